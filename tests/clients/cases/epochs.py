"""The rows that prepared loaders read in each epoch, after stopped epochs and with `set_epoch`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import running
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from running import case
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

ROWS = range(24)


def order_of(epoch: int) -> list[int]:
    made = torch.Generator().manual_seed(5 + epoch)
    return torch.randperm(len(ROWS), generator=made).tolist()


class ByEpoch(Sampler[int]):
    """A sampler whose order depends only on the epoch, as in torch's `DistributedSampler`."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(ROWS)

    def __iter__(self) -> Iterator[int]:
        return iter(order_of(self.epoch))


class Grouped(BatchSampler):
    """A custom batch sampler with batches of three."""

    def __init__(self, sampler: Any) -> None:
        super().__init__(sampler, 3, drop_last=False)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in BatchSampler(self.sampler, 3, drop_last=False):
            yield list(reversed(batch))


class GroupedByEpoch(BatchSampler):
    """A batch sampler with its own `set_epoch`, as in sentence-transformers."""

    epoch = 0

    def __init__(self) -> None:
        super().__init__(ROWS, 3, drop_last=False)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = order_of(self.epoch)
        yield from (order[start : start + 3] for start in range(0, len(order), 3))


class Around(BatchSampler):
    """A batch sampler around another one."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler, self.batch_size, self.drop_last = batch_sampler, 3, False

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batch_sampler)


def drawing() -> dict[str, Callable[[], Any]]:
    """Return loaders that draw their order from a random generator."""

    def own() -> torch.Generator:
        return torch.Generator().manual_seed(3)

    return {
        "shuffled": lambda: DataLoader(ROWS, 3, shuffle=True),
        "own generator": lambda: DataLoader(ROWS, 3, shuffle=True, generator=own()),
        "sampler's generator": lambda: DataLoader(
            ROWS, 3, sampler=RandomSampler(ROWS, generator=own())
        ),
        "replacement": lambda: DataLoader(
            ROWS, 16, sampler=RandomSampler(ROWS, replacement=True, num_samples=128)
        ),
        "own batches": lambda: DataLoader(ROWS, batch_sampler=Grouped(RandomSampler(ROWS))),
    }


def with_set_epoch() -> dict[str, Callable[[], Any]]:
    """Return loaders whose order depends on the epoch that was set."""
    return {
        "sampler": lambda: DataLoader(ROWS, 3, sampler=ByEpoch()),
        "sampler of own batches": lambda: DataLoader(ROWS, batch_sampler=Grouped(ByEpoch())),
    }


def with_set_epoch_on_one_process() -> dict[str, Callable[[], Any]]:
    """Return loaders for which Accelerate doesn't call `set_epoch` on several processes."""
    return {
        "own batches": lambda: DataLoader(ROWS, batch_sampler=GroupedByEpoch()),
        "around": lambda: DataLoader(ROWS, batch_sampler=Around(Grouped(ByEpoch()))),
    }


def read(make: Callable[[], Any], set_epoch: bool, **more: Any) -> dict[str, Any]:
    """Read three epochs, the first one completely or only some of its batches."""
    found = {}
    for behind in (None, 1, 2, 3):
        set_seed(1)
        config = DataLoaderConfiguration(**more)
        loader = Accelerator(cpu=True, dataloader_config=config).prepare(make())
        epochs: list[list[Any]] = []
        for epoch in range(3):
            if set_epoch:
                loader.set_epoch(epoch)
            epochs.append([])
            for count, batch in enumerate(loader, 1):
                epochs[-1].append(batch.tolist())
                if epoch == 0 and count == behind:
                    break
        found[f"stopped after {behind}"] = epochs
    return found


def all_of(loaders: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    return {
        name: {
            "with set_epoch": read(make, True),
            "without set_epoch": read(make, False),
            "seedable": read(make, False, use_seedable_sampler=True),
        }
        for name, make in loaders.items()
    }


@case()
def epochs_stopped_early(folder: Path) -> Any:
    return all_of(drawing())


@case()
def set_epoch_reaches_samplers(folder: Path) -> Any:
    return all_of(with_set_epoch())


@case(1)
def set_epoch_reaches_batch_samplers(folder: Path) -> Any:
    return all_of(with_set_epoch_on_one_process())


if __name__ == "__main__":
    running.main()
