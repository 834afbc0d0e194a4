"""A run interrupted at any batch resumes exactly there, including streams with a state."""

from __future__ import annotations

from itertools import chain, islice

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from accelerate_core.data.prepare_loader import skip_first_batches
from accelerate_core.errors import ConfigurationError
from accelerate_drop_in.data_loader import prepare_data_loader


class Stream(IterableDataset):
    """A stream of numbers with a state. Worker w of n reads w, w + n, ..."""

    def __init__(self, size):
        self.size = size
        self.at = 0
        self.reads = 0

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        while first + self.at * step < self.size:
            value = first + self.at * step
            self.at += 1
            self.reads += 1
            yield value
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Plain(IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


def samples(batches):
    return [value for batch in batches for value in batch.tolist()]


def stream_loader(workers, size=17, **options):
    plain = DataLoader(Stream(size), 2, num_workers=workers)
    return prepare_data_loader(plain, None, 1, 0, **options)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_stateful_stream_resumes_from_its_own_state(workers):
    whole = samples(stream_loader(workers))
    assert sorted(whole) == list(range(17))
    running = stream_loader(workers)
    seen, states = [], []
    for batch in running:
        seen += batch.tolist()
        states.append((len(seen), running.state_dict()))
    for count, state in states[:-1]:
        resumed = stream_loader(workers)
        resumed.load_state_dict(state)
        assert samples(resumed) == whole[count:]


@pytest.mark.filterwarnings("ignore:.*fast-forwarding")
@pytest.mark.parametrize("kind", ["table", "shuffled", "stream", "plain stream"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_loader_resumes_with_use_stateful_dataloader(kind, workers, world):
    pytest.importorskip("torchdata.stateful_dataloader")

    def loader(rank):
        data = {"stream": Stream(24), "plain stream": Plain(24)}.get(kind, range(24))
        plain = DataLoader(
            data,
            3,
            shuffle=kind == "shuffled",
            num_workers=workers,
            generator=torch.Generator().manual_seed(3),
        )
        return prepare_data_loader(plain, None, world, rank, use_stateful_dataloader=True)

    for rank in range(world):
        whole = samples(loader(rank))
        running = loader(rank)
        iterator = iter(running)
        seen = next(iterator).tolist() + next(iterator).tolist()
        state = running.state_dict()
        del iterator
        resumed = loader(rank)
        resumed.load_state_dict(state)
        assert seen + samples(resumed) == whole


@pytest.mark.filterwarnings("ignore:.*fast-forwarding")
@pytest.mark.parametrize("kind", [Stream, Plain])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_stateful_loader_resumes_several_times_in_an_epoch(kind, workers, world):
    pytest.importorskip("torchdata.stateful_dataloader")

    def loader():
        plain = DataLoader(kind(24), 2, num_workers=workers)
        return prepare_data_loader(plain, None, world, world - 1, use_stateful_dataloader=True)

    whole = samples(loader())
    for visits in ((2, 1, 1), (len(whole) // 2 - 1, 1)):
        seen = []
        state = None
        for count in visits:
            resumed = loader()
            if state is not None:
                resumed.load_state_dict(state)
            iterator = iter(resumed)
            seen += samples(islice(iterator, count))
            state = resumed.state_dict()
            iterator.close()
        resumed = loader()
        resumed.load_state_dict(state)
        assert seen + samples(resumed) == whole
        assert samples(resumed) == whole


def test_resuming_does_not_read_samples_again():
    running = stream_loader(0)
    iterator = iter(running)
    for _ in range(5):
        next(iterator)
    resumed = stream_loader(0)
    resumed.load_state_dict(running.state_dict())
    assert samples(resumed) == list(range(10, 17))
    assert resumed.dataset.reads == 7
    assert samples(resumed) == list(range(17))


def test_resumed_run_can_be_interrupted_and_resumed_again():
    for workers in (0, 2):
        whole = samples(stream_loader(workers))
        loader, seen = stream_loader(workers), []
        for _ in range(4):
            iterator = iter(loader)
            seen += next(iterator).tolist() + next(iterator).tolist()
            state = loader.state_dict()
            loader = stream_loader(workers)
            loader.load_state_dict(state)
        assert seen + samples(loader) == whole


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_stateful_stream_cannot_resume_with_another_number_of_workers():
    loader = stream_loader(2)
    next(iter(loader))
    resumed = stream_loader(3)
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(ConfigurationError, match=r"2 reading processes .* 3.*num_workers"):
        next(iter(resumed))


@pytest.mark.parametrize("kind", [Stream, Plain])
@pytest.mark.parametrize("worlds", [(2, 3), (3, 2), (4, 1), (1, 3)])
def test_stream_resumes_on_another_number_of_processes(kind, worlds):
    before, after = worlds

    def parts(count):
        return [prepare_data_loader(DataLoader(kind(40), 2), None, count, r) for r in range(count)]

    loaders = parts(before)
    iterators = [iter(loader) for loader in loaders]
    seen = [next(iterator).tolist() for _ in range(3) for iterator in iterators]
    assert sorted(value for part in seen for value in part) == list(range(6 * before))
    state = loaders[0].state_dict()
    rest, real = [], 40 - 6 * before
    resumed = parts(after)
    for loader in resumed:
        loader.load_state_dict(state)
    for step in zip(*resumed, strict=True):
        rest += [value for part in step for value in part.tolist()]
    assert rest[:real] == list(range(6 * before, 40))
    assert len(rest) - real < 2 * after  # the remaining samples are padding of the last step


def test_skipping_does_not_read_the_state_of_a_stream():
    loader = stream_loader(0)
    iterator = iter(loader)
    next(iterator), next(iterator)
    resumed = stream_loader(0)
    resumed.load_state_dict(loader.state_dict())
    assert samples(skip_first_batches(resumed, 1)) == list(range(2, 17))


class Counting(torch.utils.data.Dataset):
    def __init__(self, size):
        self.size = size
        self.loaded = 0

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.loaded += 1
        return index


def test_skipping_neither_loads_samples_nor_walks_the_sampler():
    data = Counting(10**7)
    plain = DataLoader(data, 5)
    for loader in (plain, prepare_data_loader(plain, None, 4, 1)):
        first = next(iter(skip_first_batches(loader, 100_000)))
        assert len(first) == 5
    assert data.loaded <= 20
    assert first.tolist()[0] == 100_000 * 20 + 5


@pytest.mark.parametrize("kind", ["shuffle", "subset", "weights"])
@pytest.mark.parametrize("worlds", [(1, 2), (2, 1), (2, 2)])
def test_order_drawn_without_a_generator_resumes_on_another_number_of_ranks(worlds, kind):
    samplers = {
        "shuffle": lambda: RandomSampler(range(16)),
        "subset": lambda: SubsetRandomSampler(range(16)),
        "weights": lambda: WeightedRandomSampler([1.0] * 16, 16, replacement=False),
    }

    def run(world, stop=None, state=None):
        """Return the remaining batches as global steps, and the position."""
        parts = []
        for rank in range(world):
            torch.manual_seed(3)
            plain = DataLoader(range(16), 4 // world, sampler=samplers[kind]())
            loader = prepare_data_loader(plain, None, world, rank)
            torch.manual_seed(4 if state is None else 50)
            if state is not None:
                loader.load_state_dict(state)
            parts.append([b.tolist() for b in islice(loader, stop)])
            after = loader.state_dict()
        return [list(chain(*step)) for step in zip(*parts, strict=True)], after

    saved, resumed = worlds
    whole, _ = run(saved)
    assert sorted(chain(*whole)) == list(range(16))
    begun, state = run(saved, stop=2)
    rest, _ = run(resumed, state=state)
    assert begun + rest == whole
