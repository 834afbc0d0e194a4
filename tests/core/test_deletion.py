"""A deleted Accelerator is freed, and the objects that it prepared still work."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import run_workers
from torch.utils.data import DataLoader, IterableDataset

from accelerate_core import Accelerator

WORKER = Path(__file__).with_name("deletion_worker.py")


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Disable the garbage collector, so that only reference counts free objects."""
    # Torch imports its compiler when the first optimizer is created, and keeps those frames alive.
    torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Trainer:
    """Holds an Accelerator, one of its loaders, and a running iteration."""

    def __init__(self, data: Any, workers: int) -> None:
        self.accelerator = Accelerator(cpu=True)
        self.loader = self.accelerator.prepare(DataLoader(data, 2, num_workers=workers))
        self.batches = iter(self.loader)
        next(self.batches)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("data", [range(8), Stream()], ids=["map", "stream"])
def test_accelerator_and_loader_are_freed_immediately(
    no_collection: None, data: Any, workers: int
) -> None:
    trainer = Trainer(data, workers)
    state = trainer.accelerator.gradient_state
    held = [weakref.ref(one) for one in (trainer.accelerator, trainer.loader, state)]
    del state, trainer
    assert [one() for one in held] == [None] * 3


def test_accelerator_that_prepared_nothing_is_freed_immediately(no_collection: None) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.gather(torch.ones(1))
    held = weakref.ref(accelerator)
    del accelerator
    assert held() is None


def parts() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    data = torch.arange(16.0).reshape(16, 1) / 16
    return model, optimizer, scheduler, DataLoader(data, 2, shuffle=True)


def train(model: Any, optimizer: Any, scheduler: Any, loader: Any) -> list[float]:
    for x in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return [parameter.item() for parameter in model.parameters()]


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_everything_is_freed_by_the_next_garbage_collection(precision: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    prepared = accelerator.prepare(*parts())
    train(*prepared)
    held = [weakref.ref(one) for one in (accelerator, *prepared)]
    del accelerator, prepared
    gc.collect()
    assert [one() for one in held] == [None] * 5


def test_everything_is_freed_immediately_after_free_memory(no_collection: None) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler, loader = accelerator.prepare(*parts())
    train(model, optimizer, scheduler, loader)
    held = [weakref.ref(one) for one in (accelerator, optimizer, scheduler, loader)]
    model, optimizer, scheduler, loader = accelerator.free_memory(
        model, optimizer, scheduler, loader
    )
    del accelerator
    assert [one() for one in held] == [None] * 4


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_prepared_objects_keep_training_without_the_accelerator(precision: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    wanted = train(*accelerator.prepare(*parts()))
    prepared = Accelerator(cpu=True, mixed_precision=precision).prepare(*parts())
    gc.collect()
    assert train(*prepared) == wanted


@pytest.mark.dist
def test_ranks_keep_training_without_the_accelerator_and_free_everything() -> None:
    run = run_workers(WORKER, 2, timeout=120).checked()
    for result in run.results:
        kept, deleted, dispatched, dispatched_and_deleted = result["weights"]
        assert kept == deleted
        assert dispatched == dispatched_and_deleted
        assert result["freed"] == [[True] * 4] * 4
