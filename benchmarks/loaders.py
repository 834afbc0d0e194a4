"""Time of prepared loaders on 2 gloo processes: each rank reads its share, or one rank reads for all.

Nothing is computed from the batches, so this measures the cost of reading and distributing them. Raw
PyTorch reads the same batches with a `DistributedSampler`.

Run with: python -m torch.distributed.run --standalone --nproc_per_node 2 benchmarks/loaders.py
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from harness import (
    FABRIC,
    OURS,
    PEER,
    RAW,
    Contender,
    Limit,
    Result,
    arguments,
    measure,
    save,
    show,
)
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

BATCH = 16
TABLE = 6400
TEXTS = 3200


class Texts(IterableDataset):
    """Token sequences as for a language model: dicts of four tensors."""

    def __init__(self) -> None:
        self.ids = torch.randint(30_000, (TEXTS, 128))
        self.ones = torch.ones(128, dtype=torch.int64)

    def __iter__(self) -> Any:
        for ids in self.ids:
            yield {
                "input_ids": ids,
                "attention_mask": self.ones,
                "token_type_ids": self.ones,
                "labels": ids,
            }


def table() -> Dataset:
    return TensorDataset(torch.randn(TABLE, 32), torch.randint(0, 9, (TABLE,)))


def epoch(loader: Any) -> Contender:
    def work() -> int:
        dist.barrier()
        return sum(1 for _ in loader)

    return work


def prepared(accelerator: Any, data: Any) -> Contender:
    return epoch(accelerator.prepare(DataLoader(data, batch_size=BATCH)))


def sharded_by_torch(data: Any) -> Contender:
    sampler = DistributedSampler(data, shuffle=False)
    return epoch(DataLoader(data, batch_size=BATCH, sampler=sampler))


def sharded_by_fabric(data: Any) -> Contender | None:
    try:
        from lightning_fabric import Fabric
    except ImportError:
        return None
    engine = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    engine.launch()
    return epoch(engine.setup_dataloaders(DataLoader(data, batch_size=BATCH)))


def main() -> None:
    options = arguments(__doc__, rounds=9)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    from accelerate_core import Accelerator
    from accelerate_core.utils import DataLoaderConfiguration

    makers = {OURS: (Accelerator, DataLoaderConfiguration)}
    try:
        from accelerate import Accelerator as Peer
        from accelerate.utils import DataLoaderConfiguration as PeerConfiguration

        makers[PEER] = (Peer, PeerConfiguration)
    except ImportError:
        pass
    sharding, dispatching = (
        {
            name: make(cpu=True, dataloader_config=configure(dispatch_batches=False))
            for name, (make, configure) in makers.items()
        },
        {
            name: make(cpu=True, dataloader_config=configure(dispatch_batches=True))
            for name, (make, configure) in makers.items()
        },
    )
    results = []
    for title, data, accelerators, limit in (
        ("each rank reads its share of a table", table(), sharding, 1.05),
        ("one rank reads a table for all", table(), dispatching, 0.15),
        ("one rank reads a stream of texts for all", Texts(), dispatching, 0.15),
    ):
        contenders: dict[str, Contender] = {}
        if accelerators is sharding:
            contenders[RAW] = sharded_by_torch(data)
        for name, accelerator in accelerators.items():
            contenders[name] = prepared(accelerator, data)
        if accelerators is sharding:
            fabric = sharded_by_fabric(data)
            if fabric is not None:
                contenders[FABRIC] = fabric
        times = measure(contenders, options.rounds)
        reference = RAW if RAW in contenders else OURS
        result = Result(f"{title}, batch {BATCH}, 2 processes", "batch", reference, times)
        result.limits = [Limit(PEER, limit)]
        results.append(result)
        if dist.get_rank() == 0:
            show(result)
    if dist.get_rank() == 0:
        save("loaders", results, options.out)
    dist.barrier()
    for accelerators in (sharding, dispatching):
        accelerators[OURS].end_training()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
