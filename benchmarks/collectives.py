"""Time of collectives on nested structures and of an evaluation loop, on 2 gloo processes.

Run with: python -m torch.distributed.run --standalone --nproc_per_node 2 benchmarks/collectives.py
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from harness import OURS, PEER, Contender, Limit, Result, arguments, measure, save, show
from torch.utils.data import DataLoader, TensorDataset

bare_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
BARE = "one bare collective"
CALLS = 30


def repeated(call: Callable[[], Any]) -> Contender:
    def work() -> int:
        dist.barrier()
        for _ in range(CALLS):
            call()
        return CALLS

    return work


def nested() -> dict[str, Any]:
    """15 tensors of three dtypes."""
    return {
        f"layer{i}": (torch.randn(8, 16), {"y": torch.arange(8), "m": torch.ones(8).bool()})
        for i in range(5)
    }


def evaluation(accelerator: Any) -> Contender:
    """Return an evaluation loop that gathers (x, y) of every batch. The last batch is padded."""
    data = TensorDataset(torch.randn(1003, 16), torch.arange(1003))
    loader = accelerator.prepare(DataLoader(data, batch_size=8))

    def work() -> int:
        dist.barrier()
        steps = seen = 0
        for x, y in loader:
            x, y = accelerator.gather_for_metrics((x, y))
            seen += len(y)
            steps += 1
        assert seen == 1003, seen
        return steps

    return work


def main() -> None:
    options = arguments(__doc__, rounds=9)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    from accelerate_core import Accelerator

    ours = Accelerator(cpu=True)
    peer = None
    try:
        from accelerate import Accelerator as Peer

        peer = Peer(cpu=True)
    except ImportError:
        pass
    tree = nested()
    size = sum(t.nbytes for pair in tree.values() for t in (pair[0], *pair[1].values()))
    flat, out = torch.zeros(size, dtype=torch.uint8), torch.zeros(2 * size, dtype=torch.uint8)
    gathers = {
        BARE: repeated(lambda: bare_gather(out, flat)),
        OURS: repeated(lambda: ours.gather(tree)),
    }
    floats = {name: pair[0] for name, pair in tree.items()}
    joined = torch.zeros(sum(t.numel() for t in floats.values()))
    reductions = {
        BARE: repeated(lambda: dist.all_reduce(joined)),
        OURS: repeated(lambda: ours.reduce(floats, "sum")),
    }
    evaluations = {OURS: evaluation(ours)}
    if peer is not None:
        gathers[PEER] = repeated(lambda: peer.gather(tree))
        reductions[PEER] = repeated(lambda: peer.reduce(floats, "sum"))
        evaluations[PEER] = evaluation(peer)
    results = []
    for title, unit, reference, contenders, limits in (
        (f"gather of 15 tensors, {size} bytes", "call", BARE, gathers, [(PEER, 0.1), (BARE, 4.0)]),
        ("reduce of 5 tensors", "call", BARE, reductions, []),
        ("loop of gather_for_metrics on (x, y)", "batch", OURS, evaluations, [(PEER, 0.4)]),
    ):
        times = measure(contenders, options.rounds)
        result = Result(f"{title}, 2 processes", unit, reference, times)
        result.limits = [Limit(other, of) for other, of in limits]
        results.append(result)
        if dist.get_rank() == 0:
            show(result)
    if dist.get_rank() == 0:
        save("collectives", results, options.out)
    dist.barrier()
    ours.end_training()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
