"""Each rank's batches for all small combinations of options, compared with a single process."""

from __future__ import annotations

from itertools import chain, cycle, islice, repeat

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from accelerate_core.data.resumable import TaggedBatch
from accelerate_core.data.shard import BatchSamplerShard, IterableDatasetShard
from accelerate_core.data.sources import IndexStream
from accelerate_core.data.steps import NOTHING, StepReader
from accelerate_core.errors import ConfigurationError
from accelerate_drop_in.data_loader import prepare_data_loader

SIZES = range(41)
PER_RANK = (1, 2, 3, 5, 8)
WORLDS = (1, 2, 3, 4)


class Stream(IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))

    def __len__(self):
        return self.size


def cases(size):
    for per_rank in PER_RANK:
        for world in WORLDS:
            for split in (False, True):
                for even in (False, True):
                    for drop_last in (False, True):
                        yield size, per_rank, world, split, even, drop_last


def joined(ranks):
    """Return all ranks' samples step by step, in rank order."""
    steps = max(map(len, ranks), default=0)
    return [s for i in range(steps) for rank in ranks if i < len(rank) for s in rank[i]]


def check(case, ranks, tails):
    size, per_rank, world, _split, even, drop_last = case
    step, data = per_rank * world, list(range(size))
    whole, rest = divmod(size, step)
    if drop_last:
        assert joined(ranks) == data[: whole * step], case
    elif even:
        steps = whole + bool(rest)
        expected = list(islice(cycle(data), steps * step)) if size else []
        # The padding starts with the first samples of the epoch.
        expected = data + list(islice(cycle(data), steps * step - size)) if size else []
        assert joined(ranks) == expected, case
        assert all(len(batch) == per_rank for rank in ranks for batch in rank), case
        assert tails == [rest or None] * world, case
    else:
        assert joined(ranks) == data, case
        assert tails == [None] * world, case
    if even or drop_last:
        assert len({len(rank) for rank in ranks}) == 1, case


@pytest.mark.parametrize("size", SIZES)
def test_ranks_divide_the_batches_of_the_plain_loader(size):
    for case in cases(size):
        _, per_rank, world, split, even, drop_last = case
        batch_size = per_rank * world if split else per_rank
        plain = BatchSampler(SequentialSampler(range(size)), batch_size, drop_last)
        shards = [BatchSamplerShard(plain, world, rank, split, even) for rank in range(world)]
        ranks = [list(shard) for shard in shards]
        check(case, ranks, [shard.real for shard in shards])
        assert [len(shard) for shard in shards] == [len(rank) for rank in ranks], case


@pytest.mark.parametrize("size", SIZES)
def test_ranks_divide_a_stream(size):
    for case in cases(size):
        _, per_rank, world, split, even, drop_last = case
        batch_size = per_rank * world if split else per_rank
        ranks, tails = [], []
        for rank in range(world):
            shard = IterableDatasetShard(
                Stream(size), batch_size, drop_last, world, rank, split, even
            )
            samples = list(shard)
            assert len(shard) == len(samples), case
            ranks.append([samples[i : i + per_rank] for i in range(0, len(samples), per_rank)])
            tails.append(shard.real)
        check(case, ranks, tails)


@pytest.mark.parametrize("size", range(0, 41, 3))
def test_whole_batches_form_the_same_steps(size):
    for case in cases(size):
        _, per_rank, world, split, even, drop_last = case
        batch_size = per_rank * world if split else per_rank
        loader = DataLoader(range(size), batch_size=batch_size, drop_last=drop_last)
        reader = StepReader(world, split, even, drop_last, batch_size=batch_size)
        ranks, real = [[] for _ in range(world)], None
        for step in reader.steps(zip(loader, repeat(None), repeat(None))):
            for rank, part in enumerate(step.parts):
                if part is not NOTHING:
                    ranks[rank].append(part.tolist())
            real = step.real
        check(case, ranks, [real] * world)


@pytest.mark.parametrize("size", [0, 1, 2, 7, 12, 13, 25])
@pytest.mark.parametrize("kind", ["map", "stream", "foreign"])
def test_prepared_loaders_report_their_end_and_padding(size, kind):
    for case in cases(size):
        _, per_rank, world, split, even, drop_last = case
        batch_size = per_rank * world if split else per_rank
        ranks, tails = [], []
        for rank in range(world):
            data = Stream(size) if kind == "stream" else range(size)
            plain = DataLoader(data, batch_size, drop_last=drop_last)
            if kind == "foreign":
                plain = Foreign(plain)
            loader = prepare_data_loader(
                plain, None, world, rank, split_batches=split, even_batches=even
            )
            got, ends = [], []
            for batch in loader:
                got.append(batch.tolist())
                ends.append(loader.end_of_dataloader)
            assert ends == [False] * (len(got) - 1) + [True] * bool(got), (kind, case, rank)
            if kind != "foreign" or not split or even:
                assert len(loader) == len(got), (kind, case, rank)
            ranks.append(got)
            tails.append(loader._latest.real)
        if world > 1:
            check(case, ranks, tails)
        else:
            assert ranks[0] == [batch.tolist() for batch in plain], (kind, case)


class Foreign:
    """A loader that does not derive from DataLoader."""

    def __init__(self, loader):
        self.loader = loader
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self.drop_last = loader.drop_last
        self.colour = "green"

    def __iter__(self):
        return iter(self.loader)

    def __len__(self):
        return len(self.loader)


def test_loader_that_is_not_a_dataloader_can_be_prepared():
    loader = prepare_data_loader(Foreign(DataLoader(range(8))), None, 2, 1)
    assert loader.base.colour == "green"
    assert isinstance(loader, DataLoader)
    assert [batch.item() for batch in loader] == [1, 3, 5, 7]


def test_batch_sampler_without_a_batch_size_is_padded_with_whole_batches():
    batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]]
    shards = [BatchSamplerShard(batches, 2, rank) for rank in range(2)]
    assert [list(shard) for shard in shards] == [
        [[0, 1, 2], [4, 5], [10]],
        [[3], [6, 7, 8, 9], [0, 1, 2]],
    ]
    assert [shard.real for shard in shards] == [1, 1]


def test_short_batch_in_the_middle_loses_no_samples():
    class Ragged:
        batch_size = 2
        drop_last = False

        def __iter__(self):
            return iter([[0, 1], [2], [3, 4], [5]])

    shards = [BatchSamplerShard(Ragged(), 2, rank) for rank in range(2)]
    assert [list(shard) for shard in shards] == [[[0, 1], [3, 4]], [[2], [5, 0]]]


def test_each_rank_loads_only_its_own_samples():
    class Watched:
        def __init__(self):
            self.loaded = []

        def __len__(self):
            return 12

        def __getitem__(self, index):
            self.loaded.append(index)
            return index

    for rank in range(3):
        data = Watched()
        list(prepare_data_loader(DataLoader(data, batch_size=2), None, 3, rank))
        assert data.loaded == [2 * rank, 2 * rank + 1, 2 * rank + 6, 2 * rank + 7]


def test_dataset_items_that_are_whole_batches_are_dealt():
    data = [torch.arange(i, i + 3) for i in range(0, 15, 3)]
    loaders = [prepare_data_loader(DataLoader(data, batch_size=None), None, 2, r) for r in (0, 1)]
    assert [[batch[0].item() for batch in loader] for loader in loaders] == [[0, 6, 12], [3, 9, 0]]
    assert [loader._latest.real for loader in loaders] == [3, 3]


def test_workers_report_which_steps_are_padded():
    class Own(IterableDataset):
        """Each worker reads ten different samples, so the last step of each is padded."""

        def __iter__(self):
            worker = torch.utils.data.get_worker_info().id
            return iter(range(10 * worker, 10 * worker + 10))

    kept = []
    loaders = [
        prepare_data_loader(DataLoader(Own(), batch_size=2, num_workers=2), None, 2, rank)
        for rank in range(2)
    ]
    for batches in zip(*loaders, strict=True):
        together = list(chain.from_iterable(batch.tolist() for batch in batches))
        kept += together[: loaders[0]._latest.real]
    assert sorted(kept) == list(range(20))


def test_tensors_in_a_tagged_batch_are_pinned(monkeypatch):
    pin = torch.utils.data._utils.pin_memory
    monkeypatch.setattr(pin, "pin_memory", lambda batch, device: ("pinned", batch))
    tagged = TaggedBatch([1], 3, 0, None).pin_memory("cuda")
    assert (tagged.batch, tagged.real) == (("pinned", [1]), 3)


@pytest.mark.parametrize(
    "build",
    [
        lambda: BatchSamplerShard(BatchSampler(range(9), 3, False), 2, 0, split_batches=True),
        lambda: IterableDatasetShard(Stream(9), 3, False, 2, 0, split_batches=True),
        lambda: prepare_data_loader(DataLoader(range(9), 3), None, 2, 0, split_batches=True),
        lambda: prepare_data_loader(DataLoader(Stream(9), 3), None, 2, 0, split_batches=True),
    ],
)
def test_batch_that_cannot_be_split_is_refused(build):
    with pytest.raises(
        ConfigurationError, match=r"batch_size=3 is not divisible by num_processes=2"
    ):
        build()


def test_errors_for_impossible_sharding_options():
    with pytest.raises(ConfigurationError, match="with a `batch_size`"):
        BatchSamplerShard([[0], [1]], 2, 0, split_batches=True)
    with pytest.raises(ConfigurationError, match="less than num_processes=2"):
        prepare_data_loader(DataLoader(range(4)), None, 2, 2)
    with pytest.raises(ConfigurationError, match=r"Did you mean 'generator'"):
        prepare_data_loader(DataLoader(range(4)), None, 1, 0, rng_types=["genrator"])
    with pytest.raises(ConfigurationError, match="needs a process group"):
        prepare_data_loader(DataLoader(range(4)), None, 2, 0, dispatch_batches=True)
    with pytest.raises(ConfigurationError, match="cannot be iterated"):
        prepare_data_loader(3, None, 1, 0)


def test_skipping_indices_keeps_the_padding_at_the_end():
    stream = IndexStream([[0], [1], [2], [3], [4]])
    stream.start, stream.head = 3, 2
    assert list(stream) == [[0], [1], [3], [4]]
    stream.start = 1
    assert list(stream) == [[0], [1], [1], [2], [3], [4]]
