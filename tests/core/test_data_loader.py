"""Prepared loaders in one process keep order and attributes, and resume from a position."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from accelerate_core.data.loader import DataLoaderShard
from accelerate_core.data.order import SeedableRandomSampler
from accelerate_core.data.prepare_loader import override_even_batches, skip_first_batches
from accelerate_core.distributed.process import current_runtime
from accelerate_core.errors import ConfigurationError, MissingPluginError
from accelerate_drop_in.data_loader import SkipBatchSampler, prepare_data_loader


class Augmenting:
    """Draws from the global generator for every sample, as augmentation does."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index, torch.rand(()).item()


class Numbers(IterableDataset):
    def __init__(self, size=10):
        self.size = size
        self.epochs = []

    def __iter__(self):
        return iter(range(self.size))

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class Custom(DataLoader):
    def __init__(self, data, flavour, *, batch_size=2):
        super().__init__(data, batch_size=batch_size)
        self.flavour = flavour
        self.served = 0

    def describe(self):
        return f"{self.flavour} loader"


class Doubling(Custom):
    """Yields other batches than its sampler selects."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch
            yield batch * 10


def plain_loaders():
    yield "sequential", lambda: DataLoader(Augmenting(), 3)
    yield "shuffled", lambda: DataLoader(Augmenting(), 3, shuffle=True)
    yield "replacement", lambda: DataLoader(Augmenting(), 3, sampler=RandomSampler(range(10), True))
    yield "subset", lambda: DataLoader(Augmenting(), 3, sampler=SubsetRandomSampler([1, 4, 7, 9]))
    yield (
        "weighted",
        lambda: DataLoader(Augmenting(), 3, sampler=WeightedRandomSampler([0.1] * 10, 8)),
    )
    yield (
        "generator",
        lambda: DataLoader(
            Augmenting(), 3, shuffle=True, generator=torch.Generator().manual_seed(5)
        ),
    )
    yield "no batches", lambda: DataLoader(Augmenting(), batch_size=None, shuffle=True)
    yield "workers", lambda: DataLoader(Augmenting(), 3, shuffle=True, num_workers=1)
    yield "drop last", lambda: DataLoader(Augmenting(), 4, shuffle=True, drop_last=True)


LOADERS = dict(plain_loaders())


def run(loader, epochs=2):
    """Read two epochs with random draws in between. Return the batches and a draw afterwards."""
    out = []
    for _ in range(epochs):
        for batch in loader:
            out.append(([torch.as_tensor(field).tolist() for field in batch], torch.rand(1).item()))
    return out, torch.rand(1).item()


@pytest.mark.parametrize("name", LOADERS)
def test_loader_on_one_process_behaves_like_plain_pytorch(name):
    torch.manual_seed(3)
    expected = run(LOADERS[name]())
    torch.manual_seed(3)
    prepared = prepare_data_loader(LOADERS[name](), torch.device("cpu"), 1, 0, put_on_device=True)
    assert run(prepared) == expected


def test_interleaved_loaders_draw_random_numbers_in_the_plain_order():
    def both(prepare):
        torch.manual_seed(3)
        pair = [prepare(DataLoader(range(6), 2, shuffle=True)) for _ in range(2)]
        return [(a.tolist(), b.tolist()) for a, b in zip(*pair, strict=True)]

    def opened_by_its_first_batch(loader):
        yield from loader

    assert both(lambda x: prepare_data_loader(x, None, 1, 0)) == both(opened_by_its_first_batch)


@pytest.mark.parametrize("name", ["sequential", "no batches"])
def test_loader_with_a_known_length_does_not_read_ahead(name):
    loader = prepare_data_loader(LOADERS[name](), None, 1, 0)
    torch.manual_seed(0)
    next(iter(LOADERS[name]()))
    expected = torch.rand(1)
    torch.manual_seed(0)
    next(iter(loader))
    assert torch.equal(torch.rand(1), expected)


def test_prepared_loader_is_an_instance_of_the_users_class():
    loader = prepare_data_loader(Custom(range(10), "mint"), None, 2, 1)
    assert isinstance(loader, DataLoader)
    assert isinstance(loader, DataLoaderShard)
    assert isinstance(loader.base, Custom)
    assert loader.base.describe() == "mint loader"
    loader.num_workers = 7
    assert loader.base.num_workers == 7
    loader.num_workers = 0
    assert [batch.tolist() for batch in loader] == [[2, 3], [6, 7], [0, 1]]
    assert prepare_data_loader(loader) is loader
    with pytest.raises(ValueError, match="should not be set"):
        loader.batch_size = 4
    with pytest.raises(AttributeError, match="no_such"):
        _ = loader.no_such


def test_original_loader_is_not_modified():
    plain = DataLoader(range(10), 2, shuffle=True)
    before = dict(plain.__dict__)
    list(prepare_data_loader(plain, None, 2, 1, use_seedable_sampler=True))
    assert plain.__dict__ == before


def test_batches_of_a_subclass_with_custom_iteration_are_dealt_in_order():
    loaders = [prepare_data_loader(Doubling(range(8), "mint"), None, 2, r) for r in range(2)]
    assert [b.tolist() for b in loaders[1]] == [[0, 10], [20, 30], [40, 50], [60, 70]]
    one = prepare_data_loader(Doubling(range(4), "mint"), None, 1, 0)
    ends = []
    for _ in one:
        ends.append(one.end_of_dataloader)
    assert ends == [False, False, False, True]


def test_lengths_and_batch_sizes_of_prepared_loaders():
    loader = prepare_data_loader(DataLoader(range(10), 4), None, 2, 0)
    assert (loader.total_batch_size, loader.total_dataset_length, len(loader)) == (8, 10, 2)
    split = prepare_data_loader(DataLoader(range(10), 4), None, 2, 0, split_batches=True)
    assert (split.total_batch_size, len(split)) == (4, 3)
    stream = prepare_data_loader(DataLoader(Numbers(), 4), None, 2, 0, split_batches=True)
    assert stream.total_batch_size == 4
    with pytest.raises(TypeError):
        len(stream)


def test_device_feed_is_used_only_when_batches_move():
    calls = []

    def feed(batches):
        for batch in batches:
            calls.append(batch)
            yield batch

    def serve(device, put):
        calls.clear()
        plain = DataLoader(TensorDataset(torch.arange(4.0)), 2)
        loader = prepare_data_loader(plain, device, 1, 0, put_on_device=put, feed=feed)
        return [(batch, loader.end_of_dataloader) for batch in loader]

    serve("cpu", True)
    assert not calls
    serve("meta", False)
    assert not calls
    served = serve("meta", True)
    assert len(calls) == 2
    assert [end for _, end in served] == [False, True]


def test_default_device_is_the_current_device():
    loader = prepare_data_loader(DataLoader(range(4), 2), num_processes=1, process_index=0)
    assert loader.device is None
    placed = prepare_data_loader(
        DataLoader(range(4), 2), num_processes=1, process_index=0, put_on_device=True
    )
    assert placed.device == current_runtime().device


def test_default_device_feed_moves_batches():
    plain = DataLoader(TensorDataset(torch.arange(4.0)), 2)
    loader = prepare_data_loader(plain, "meta", 1, 0, put_on_device=True)
    assert all(batch[0].device.type == "meta" for batch in loader)


def test_device_feed_that_reads_ahead_does_not_shift_the_end():
    def ahead(batches):
        held = list(batches)
        yield from held

    plain = DataLoader(range(9), 2)
    loader = prepare_data_loader(plain, "meta", 2, 0, put_on_device=True, feed=ahead)
    assert [(loader.end_of_dataloader, loader.remainder) for _ in loader] == [
        (False, 1),
        (False, 1),
        (True, 1),
    ]
    assert loader.state_dict()["epoch"] == 1


def test_seedable_sampler_order_depends_only_on_seed_and_epoch():
    def order(epoch, **options):
        loader = prepare_data_loader(
            DataLoader(range(10), 5, shuffle=True), None, 1, 0, use_seedable_sampler=True, **options
        )
        loader.set_epoch(epoch)
        return torch.cat(list(loader)).tolist()

    torch.rand(7)
    assert order(2, data_seed=5) == order(2, data_seed=5)
    assert (
        order(2, data_seed=5)
        == torch.randperm(10, generator=torch.Generator().manual_seed(7)).tolist()
    )
    assert order(2, data_seed=5) != order(3, data_seed=5)


def test_seedable_sampler_advances_its_epoch_automatically():
    loader = prepare_data_loader(
        DataLoader(range(10), 5, shuffle=True),
        None,
        1,
        0,
        use_seedable_sampler=True,
        data_seed=1,
    )
    epochs = [torch.cat(list(loader)).tolist() for _ in range(3)]
    assert epochs == [
        torch.randperm(10, generator=torch.Generator().manual_seed(1 + e)).tolist()
        for e in range(3)
    ]
    sampler = SeedableRandomSampler(range(10), data_seed=1)
    assert list(sampler) == epochs[0]


def test_set_epoch_reaches_the_dataset_only_when_called():
    data = Numbers()
    loader = prepare_data_loader(DataLoader(data, 2), None, 2, 0)
    list(loader)
    assert data.epochs == []
    loader.set_epoch(4)
    assert data.epochs == [4]


class RecordingBatches(BatchSampler):
    """A custom sampler with batches of two that records its epochs and counts its batches."""

    def __init__(self, sampler, size=2):
        super().__init__(sampler, size, drop_last=False)
        self.epochs = []
        self.given = 0

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        for batch in BatchSampler(self.sampler, self.batch_size, drop_last=False):
            self.given += 1
            yield batch


class WrappingBatches(BatchSampler):
    """A batch sampler around another one, which only receives the epoch through it."""

    def __init__(self, batch_sampler):
        self.batch_sampler, self.batch_size, self.drop_last = batch_sampler, 2, False

    def __iter__(self):
        return iter(self.batch_sampler)


@pytest.mark.parametrize("world", [1, 2])
def test_set_epoch_reaches_custom_samplers_on_any_number_of_ranks(world):
    batches = RecordingBatches(range(8))
    loader = prepare_data_loader(DataLoader(range(8), batch_sampler=batches), None, world, 0)
    loader.set_epoch(3)
    assert batches.epochs == [3]

    sampler = SeedableRandomSampler(range(8), data_seed=1)
    around = WrappingBatches(BatchSampler(sampler, 2, drop_last=False))
    loader = prepare_data_loader(DataLoader(range(8), batch_sampler=around), None, world, 0)
    loader.set_epoch(5)
    assert sampler.epoch == 5


def test_interrupted_epoch_has_read_at_most_one_step_ahead():
    batches = RecordingBatches(range(16))
    loader = prepare_data_loader(DataLoader(range(16), batch_sampler=batches), None, 2, 0)
    next(iter(loader))
    assert batches.given == 4  # the step that was read and the next one, on two ranks


@pytest.mark.parametrize("taken", [0, 1, 3, 5])
@pytest.mark.parametrize("kind", ["sequential", "shuffled", "workers", "generator", "stream"])
@pytest.mark.parametrize("stateful", [False, True])
def test_resumed_run_reads_only_the_remaining_batches(kind, taken, stateful):
    if stateful:
        pytest.importorskip("torchdata")

    def build():
        options = {"batch_size": 2}
        if kind != "stream":
            options["shuffle"] = kind != "sequential"
        if kind == "workers":
            options["num_workers"] = 2
        if kind == "generator":
            options["generator"] = torch.Generator().manual_seed(1)
        data = Numbers() if kind == "stream" else range(10)
        plain = DataLoader(data, **options)
        return prepare_data_loader(plain, None, 1, 0, use_stateful_dataloader=stateful)

    torch.manual_seed(11)
    loader = build()
    whole = []
    for epoch in range(3):
        whole.append([])
        if epoch == 1 and taken == 0:
            saved, rng = loader.state_dict(), torch.get_rng_state()
        for batch in loader:
            whole[-1].append(batch.tolist())
            torch.rand(1)
            if epoch == 1 and len(whole[-1]) == taken:
                saved, rng = loader.state_dict(), torch.get_rng_state()
    assert saved["epoch"] == 1
    assert saved["batches_seen"] == taken

    torch.manual_seed(999)
    again = build()
    torch.set_rng_state(rng)
    again.load_state_dict(saved)
    rest = [batch.tolist() for batch in read_and_draw(again)]
    assert rest == whole[1][taken:]
    assert again.iteration == 2
    assert [batch.tolist() for batch in again] == whole[2]


def read_and_draw(loader):
    for batch in loader:
        torch.rand(1)
        yield batch


@pytest.mark.parametrize("worlds", [(1, 2), (2, 1), (2, 4), (4, 2), (2, 3)])
@pytest.mark.parametrize("split", [False, True])
def test_saved_position_resumes_on_another_number_of_ranks(worlds, split):
    before, after = worlds
    size = 12 if split else 2
    data = range(41)

    def ranks(world):
        return [
            prepare_data_loader(DataLoader(data, size), None, world, r, split_batches=split)
            for r in range(world)
        ]

    def steps(loaders):
        for batches in zip(*loaders, strict=True):
            flat = [sample for batch in batches for sample in batch.tolist()]
            yield flat[: loaders[0]._latest.real]

    first = ranks(before)
    iterator = steps(first)
    seen = next(iterator) + next(iterator)
    saved = first[0].state_dict()
    assert saved["samples_seen"] == len(seen)
    second = ranks(after)
    for loader in second:
        loader.load_state_dict(saved)
    for flat in steps(second):
        seen += flat
    assert seen == list(data)


def test_last_step_is_padded_identically_after_resuming():
    def build():
        return prepare_data_loader(DataLoader(range(9), 2), None, 2, 1)

    loader = build()
    iterator = iter(loader)
    next(iterator)
    saved = loader.state_dict()
    rest = [batch.tolist() for batch in iterator]
    again = build()
    again.load_state_dict(saved)
    assert [batch.tolist() for batch in again] == rest


def test_state_of_another_kind_of_loader_is_refused():
    loader = prepare_data_loader(DataLoader(range(9), 2), None, 1, 0)
    with pytest.raises(ConfigurationError, match="not the position of a prepared loader"):
        loader.load_state_dict({"_num_yielded": 3})
    state = loader.state_dict() | {"global_batches": 1, "samples_seen": 3, "batch_size": 3}
    with pytest.raises(ConfigurationError, match="not divisible by batch_size=2"):
        loader.load_state_dict(state)


@pytest.mark.parametrize("kind", ["map", "stream", "no batches"])
@pytest.mark.parametrize("prepared", [False, True])
def test_skip_first_batches_yields_the_remaining_batches(kind, prepared):
    data = Numbers() if kind == "stream" else range(10)
    plain = DataLoader(data, batch_size=None if kind == "no batches" else 2)
    loader = prepare_data_loader(plain, None, 1, 0) if prepared else plain
    expected = [batch.tolist() if hasattr(batch, "tolist") else batch for batch in plain][2:]
    skipping = skip_first_batches(loader, 2)
    for _ in range(2):
        got = [batch.tolist() if hasattr(batch, "tolist") else batch for batch in skipping]
        assert got == expected
    if kind != "stream":
        assert len(skipping) == len(expected)
        assert len(skip_first_batches(loader, 100)) == 0
    assert list(skip_first_batches(loader, 100)) == []


def test_skipped_batches_are_not_loaded():
    loaded = []

    class Watched:
        def __len__(self):
            return 10

        def __getitem__(self, index):
            loaded.append(index)
            return index

    for loader in (
        DataLoader(Watched(), 2),
        prepare_data_loader(DataLoader(Watched(), 2), None, 1, 0),
    ):
        loaded.clear()
        list(skip_first_batches(loader, 4))
        assert loaded == [8, 9]


def test_skipping_after_loading_a_state_counts_from_the_start_of_the_epoch():
    def build():
        plain = DataLoader(range(10), 2, shuffle=True)
        return prepare_data_loader(plain, None, 1, 0, use_seedable_sampler=True, data_seed=3)

    loader = build()
    epochs = []
    for epoch in range(3):
        epochs.append([])
        for batch in loader:
            epochs[-1].append(batch.tolist())
            if epoch == 1 and len(epochs[-1]) == 2:
                saved = loader.state_dict()
    again = build()
    again.load_state_dict(saved)
    assert [b.tolist() for b in skip_first_batches(again, 3)] == epochs[1][3:]
    assert [b.tolist() for b in again] == epochs[2]


def test_skip_batch_sampler_reports_the_remaining_and_the_total_length():
    sampler = SkipBatchSampler(BatchSampler(range(10), 3, False), 2)
    assert list(sampler) == [[6, 7, 8], [9]]
    assert (len(sampler), sampler.total_length, sampler.batch_size) == (2, 4, 3)
    with pytest.raises(ConfigurationError, match="0 or more"):
        skip_first_batches(DataLoader(range(3)), -1)


def test_even_batches_can_be_overridden_temporarily():
    loader = prepare_data_loader(DataLoader(range(5), 2), None, 2, 1)
    with override_even_batches([loader], False):
        assert [batch.tolist() for batch in loader] == [[2, 3]]
    assert [batch.tolist() for batch in loader] == [[2, 3], [1, 2]]
    assert loader.even_batches


def test_dataset_error_is_raised_at_its_own_batch():
    class Failing(IterableDataset):
        def __iter__(self):
            yield from range(4)
            raise OSError("disk")

    loader = prepare_data_loader(DataLoader(Failing(), 2), None, 1, 0)
    got = []
    with pytest.raises(OSError, match="disk"):
        got.extend((batch.tolist(), loader.end_of_dataloader) for batch in loader)
    assert got == [([0, 1], False), ([2, 3], False)]


def test_stateful_loader_keeps_the_subclass_and_needs_torchdata(monkeypatch):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    loader = prepare_data_loader(Custom(range(4), "mint"), None, 1, 0, use_stateful_dataloader=True)
    assert isinstance(loader.base, torchdata.StatefulDataLoader)
    assert loader.base.describe() == "mint loader"
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    monkeypatch.setitem(__import__("sys").modules, "torchdata.stateful_dataloader", None)
    with pytest.raises(MissingPluginError, match=r'pip install "torchdata>=0.10"'):
        prepare_data_loader(DataLoader(range(4)), None, 1, 0, use_stateful_dataloader=True)


def test_stream_with_state_methods_resumes_through_them():
    pytest.importorskip("torchdata")
    reads = []

    class Stateful(IterableDataset):
        def __init__(self):
            self.at = 0

        def __iter__(self):
            start, self.at = self.at, 0
            for self.at in range(start + 1, 11):
                reads.append(self.at)
                yield self.at
            self.at = 0

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    def build():
        plain = DataLoader(Stateful(), 2)
        return prepare_data_loader(plain, None, 1, 0, use_stateful_dataloader=True)

    loader = build()
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    saved = loader.state_dict()
    again = build()
    again.load_state_dict(saved)
    reads.clear()
    assert [batch.tolist() for batch in again] == [[5, 6], [7, 8], [9, 10]]
    assert reads == [5, 6, 7, 8, 9, 10]


def test_persistent_workers_survive_several_epochs():
    plain = DataLoader(range(8), 2, num_workers=1, persistent_workers=True)
    loader = prepare_data_loader(plain, None, 2, 0)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[0, 1], [4, 5]]


def test_workers_of_different_ranks_are_seeded_differently():
    class Seeds:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return torch.initial_seed() % 2**31, random.getrandbits(30)

    def of(rank):
        plain = DataLoader(Seeds(), 1, num_workers=1, generator=torch.Generator().manual_seed(1))
        world = 1 if rank is None else 2
        loader = prepare_data_loader(plain, None, world, rank or 0)
        return [int(value) for value in next(iter(loader))]

    assert of(0) == of(None)
    assert of(1)[0] != of(0)[0]
    assert of(1)[1] != of(0)[1]
