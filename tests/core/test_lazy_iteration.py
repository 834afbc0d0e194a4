"""Progress bars call `iter()` on a loader twice. An iterator that is never advanced has no effect."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from rich.progress import track
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from tqdm.auto import tqdm

from accelerate_core import Accelerator, DataLoaderConfiguration, skip_first_batches


class Augmented:
    """Draws from the global generator for each sample."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, torch.rand(()).item()


class Stream(IterableDataset):
    reads = 0

    def __iter__(self) -> Any:
        self.reads += 1
        for number in range(12):
            yield number, torch.rand(()).item()


def own_generator() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    sampler = RandomSampler(Augmented(), generator=generator)
    return DataLoader(Augmented(), 3, sampler=sampler)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "sequential": lambda: DataLoader(Augmented(), 3),
    "shuffled": lambda: DataLoader(Augmented(), 3, shuffle=True),
    "own generator": own_generator,
    "workers": lambda: DataLoader(Augmented(), 3, shuffle=True, num_workers=2),
    "persistent workers": lambda: DataLoader(
        Augmented(), 3, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "stream": lambda: DataLoader(Stream(), 3),
}


def numbered(loader: Iterable[Any]) -> Iterable[Any]:
    return (batch for _, batch in enumerate(loader))


BARS: dict[str, Callable[[Any], Iterable[Any]]] = {
    "tqdm": lambda loader: tqdm(loader, disable=True),
    "rich": lambda loader: track(loader, disable=True),
    "enumerate": numbered,
    "one iterator for nothing": lambda loader: (iter(loader), loader)[1],
}


def prepared(kind: str, seedable: bool) -> Any:
    torch.manual_seed(0)
    config = DataLoaderConfiguration(use_seedable_sampler=seedable)
    return Accelerator(cpu=True, dataloader_config=config).prepare(LOADERS[kind]())


def two_epochs(loader: Any, bar: Callable[[Any], Iterable[Any]] = iter) -> list[Any]:
    batches = [[part.tolist() for part in batch] for _ in range(2) for batch in bar(loader)]
    return [*batches, torch.rand(()).item()]


@pytest.mark.parametrize("bar", BARS)
@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("kind", LOADERS)
def test_progress_bar_does_not_change_the_order(kind: str, seedable: bool, bar: str) -> None:
    wanted = two_epochs(prepared(kind, seedable))
    assert two_epochs(prepared(kind, seedable), BARS[bar]) == wanted


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("skipped", [0, 1])
def test_iterator_that_is_never_advanced_costs_nothing(kind: str, skipped: int) -> None:
    loader = prepared(kind, seedable=False)
    if skipped:
        loader = skip_first_batches(loader, skipped)
    before, running = torch.get_rng_state(), set(multiprocessing.active_children())
    iterators = [iter(loader) for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), before)
    assert set(multiprocessing.active_children()) <= running
    assert getattr(loader.dataset, "reads", 0) == 0
    assert loader.state_dict()["batches_seen"] == 0
    assert not loader.gradient_state.in_dataloader
    assert len(list(iterators[0])) == 4 - skipped


@pytest.mark.filterwarnings("ignore:load_state moved this loader")
def test_iterator_starts_at_a_position_loaded_before_its_first_batch() -> None:
    loader = prepared("sequential", seedable=False)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    resumed = prepared("sequential", seedable=False)
    waiting = iter(resumed)
    resumed.load_state_dict(state)
    assert [batch[0].tolist() for batch in waiting] == [[3, 4, 5], [6, 7, 8], [9, 10, 11]]
