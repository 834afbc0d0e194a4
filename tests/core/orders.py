"""Record which samples each rank reads, in which order. Also runs with Hugging Face Accelerate.

    With Accelerate installed, this records its orders:

    python tests/core/orders.py tests/core/orders.json

`test_orders.py` runs it with accelerate-core and compares the results.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

WORLDS = (1, 2, 3)
BATCH = 6


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return iter(torch.arange(self.size))


def numbers(size: int) -> torch.Tensor:
    return torch.arange(size)


def cases() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return a loader factory and its `DataLoaderConfiguration` for each case."""
    made: dict[str, tuple[Any, dict[str, Any]]] = {}
    flags = (False, True)
    for kind, split, dispatch, even, drop, size in itertools.product(
        ("plain", "shuffled", "seedable", "stream"), flags, flags, flags, flags, (4, 13, 24)
    ):
        if size == 24 and not (even and drop):
            continue  # no partial step at the end
        name = kind + "".join(
            f" {word}"
            for word, on in [
                ("split", split), ("dispatch", dispatch), ("uneven", not even), ("drop", drop),
            ]
            if on
        )  # fmt: skip
        options = {"drop_last": drop, "shuffle": kind in ("shuffled", "seedable") or None}
        config = {"split_batches": split, "dispatch_batches": dispatch, "even_batches": even}

        def make(size: int = size, kind: str = kind, options: Any = options) -> Any:
            data = Stream(size) if kind == "stream" else numbers(size)
            return DataLoader(data, BATCH, **options)

        made[f"{name} {size}"] = (make, {**config, "use_seedable_sampler": kind == "seedable"})
    return {**made, **_samplers()}


def _samplers() -> dict[str, tuple[Any, dict[str, Any]]]:
    data = numbers(13)

    def own(seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    makers = {
        "subset": lambda: DataLoader(data, 4, sampler=SubsetRandomSampler(range(2, 12))),
        "weighted": lambda: DataLoader(
            data, 4, sampler=WeightedRandomSampler(torch.ones(13).tolist(), 11)
        ),
        "replacement": lambda: DataLoader(
            data, 4, sampler=RandomSampler(data, replacement=True, num_samples=40)
        ),
        "more": lambda: DataLoader(data, 4, sampler=RandomSampler(data, num_samples=30)),
        "own generator": lambda: DataLoader(data, 4, shuffle=True, generator=own(7)),
        "batch sampler": lambda: DataLoader(
            data, batch_sampler=BatchSampler(RandomSampler(data), 4, drop_last=False)
        ),
        "uneven batches": lambda: DataLoader(data, batch_sampler=[[0, 1, 2], [3], [4, 5], [6, 7]]),
        "batches of the data": lambda: DataLoader(
            data, batch_size=None, sampler=BatchSampler(RandomSampler(data), 4, drop_last=False)
        ),
    }
    made: dict[str, tuple[Any, dict[str, Any]]] = {}
    for name, make in makers.items():
        made[name] = (make, {})
        if "generator" in name or name in ("more", "replacement"):
            made[f"seedable {name}"] = (make, {"use_seedable_sampler": True})
        if name != "batches of the data":
            made[f"dispatch {name}"] = (make, {"dispatch_batches": True})
    made["data seed"] = (
        makers["more"],
        {"use_seedable_sampler": True, "data_seed": 3},
    )
    return made


def read(make: Any, config: dict[str, Any]) -> str:
    """Return the batches of two epochs, and a random number drawn after them, as one line."""
    try:
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration, InitProcessGroupKwargs, set_seed
    except ImportError:
        from accelerate_core import Accelerator
        from accelerate_core.utils import DataLoaderConfiguration, InitProcessGroupKwargs, set_seed
    set_seed(11)
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(**config),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=60))],
    )
    try:
        loader = accelerator.prepare(make())
        epochs = [
            "|".join(".".join(map(str, batch.reshape(-1).tolist())) for batch in loader)
            for _ in range(2)
        ]
        return " / ".join([*epochs, str(int(torch.randint(1000, ()).item()))])
    except Exception as error:
        return f"{type(error).__name__}"


def run(names: list[str] | None = None) -> dict[str, str]:
    """Return this rank's line for each case."""
    warnings.simplefilter("ignore")
    return {name: read(*case) for name, case in cases().items() if names is None or name in names}


def record(target: Path) -> None:
    found: dict[str, Any] = {}
    for world in WORLDS:
        with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
            free.close()
            common = {**os.environ, "WORLD_SIZE": str(world), "MASTER_PORT": port}
            common |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
            common |= {"LOCAL_WORLD_SIZE": str(world), "ORDERS": folder}
            ranks = [
                subprocess.Popen(
                    [sys.executable, __file__],
                    env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
                for rank in range(world)
            ]
            for one in ranks:
                one.wait(500)
            for rank in range(world):
                lines = json.loads(Path(folder, str(rank)).read_text())
                for name, line in lines.items():
                    found.setdefault(name, {}).setdefault(str(world), []).append(line)
    target.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        record(Path(sys.argv[1]))
    else:
        Path(os.environ["ORDERS"], os.environ["RANK"]).write_text(json.dumps(run()))
