"""Prepared loaders with any combination of options neither lose nor duplicate samples.

Ranks are simulated one after another, because the samples of a rank depend only on its index. The two
kinds of loaders that need a process group are tested in `data_worker.py`.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accelerate_core.data.order import cursor_over, iterate_from
from accelerate_core.data.prepare_loader import skip_first_batches
from accelerate_core.data.shard import BatchSamplerShard
from accelerate_core.training.gradient_state import GradientState
from accelerate_drop_in.data_loader import prepare_data_loader


class Stream(IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


class CustomSampler(Sampler):
    """A custom sampler whose order cannot be derived from its attributes."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        yield from (number * 7 % self.size for number in range(self.size))

    def __len__(self):
        return self.size


class CustomBatchSampler:
    """A custom batch sampler with batches of any length."""

    def __init__(self, size, batch):
        self.size = size
        self.batch = batch

    def __iter__(self):
        at = 0
        for turn in range(self.size):
            length = 1 + turn % self.batch
            if at >= self.size:
                return
            yield list(range(at, min(at + length, self.size)))
            at += length


@st.composite
def setups(draw):
    world = draw(st.integers(1, 5))
    split = draw(st.booleans())
    per_rank = draw(st.integers(1, 4))
    return {
        "size": draw(st.integers(0, 41)),
        "batch": per_rank * world if split else per_rank,
        "world": world,
        "split_batches": split,
        "drop_last": draw(st.booleans()),
        "even_batches": draw(st.booleans()),
        "kind": draw(st.sampled_from(["order", "shuffle", "own", "stream"])),
    }


def plain_loader(setup):
    size, batch, drop_last = setup["size"], setup["batch"], setup["drop_last"]
    if setup["kind"] == "stream":
        return DataLoader(Stream(size), batch, drop_last=drop_last)
    if setup["kind"] == "own":
        return DataLoader(range(size), batch, sampler=CustomSampler(size), drop_last=drop_last)
    shuffle = setup["kind"] == "shuffle" and size > 0
    generator = torch.Generator().manual_seed(5)
    return DataLoader(range(size), batch, shuffle=shuffle, drop_last=drop_last, generator=generator)


def prepared(setup, world=None, state=None):
    """Return one loader per rank."""
    world = world or setup["world"]
    return [
        prepare_data_loader(
            plain_loader(setup),
            None,
            world,
            rank,
            split_batches=setup["split_batches"],
            even_batches=setup["even_batches"],
            gradient_state=GradientState(num_steps=1),
        )
        for rank in range(world)
    ]


def steps_of(loaders):
    """Return the global steps, each a list of the ranks' batches, or None for a rank without one."""
    parts = []
    for loader in loaders:
        own = []
        for batch in loader:
            remainder = loader.gradient_state.metrics_cut()[0]
            own.append((batch.tolist(), remainder, loader.end_of_dataloader))
        parts.append(own)
    longest = max(len(own) for own in parts)
    return [[own[i] if i < len(own) else None for own in parts] for i in range(longest)]


@given(setups())
@settings(max_examples=250, deadline=None)
def test_ranks_together_read_the_epoch_of_the_plain_loader(setup):
    plain = [sample for batch in plain_loader(setup) for sample in batch.tolist()]
    every = [
        sample for batch in plain_loader(setup | {"drop_last": False}) for sample in batch.tolist()
    ]
    whole_step = setup["batch"] if setup["split_batches"] else setup["batch"] * setup["world"]
    steps = steps_of(prepared(setup))
    joined = [sample for step in steps for part in step if part for sample in part[0]]
    if setup["drop_last"]:
        assert joined == every[: len(every) // whole_step * whole_step]
        return
    assert joined[: len(plain)] == plain
    if not setup["even_batches"] or setup["world"] == 1:
        assert len(joined) == len(plain)
        return
    # As documented, the last step is padded with samples from the start of the epoch.
    assert len(joined) == -(-len(plain) // whole_step) * whole_step if plain else not joined
    padding = joined[len(plain) :]
    assert padding == (plain * (len(padding) // max(len(plain), 1) + 1))[: len(padding)]
    assert len({len(part[0]) for step in steps for part in step}) <= 1


@given(setups())
@settings(max_examples=150, deadline=None)
def test_metrics_see_every_sample_exactly_once(setup):
    plain = [sample for batch in plain_loader(setup) for sample in batch.tolist()]
    seen = []
    for step in steps_of(prepared(setup)):
        gathered = [sample for part in step if part for sample in part[0]]
        remainders = {part[1] for part in step if part}
        assert len(remainders) == 1
        seen += gathered[: remainders.pop() or None]
    if setup["drop_last"]:
        assert seen == plain[: len(seen)]
        step = setup["batch"] if setup["split_batches"] else setup["batch"] * setup["world"]
        assert len(plain) - len(seen) < step
    else:
        assert seen == plain


@given(setups())
@settings(max_examples=100, deadline=None)
def test_end_is_flagged_on_the_last_batch_and_length_is_exact(setup):
    for loader in prepared(setup):
        ends = [loader.end_of_dataloader for _ in loader]
        assert ends == [False] * (len(ends) - 1) + [True] * bool(ends)
        if setup["kind"] != "stream":
            assert len(loader) == len(ends)


@given(setups(), st.integers(0, 40), st.integers(1, 5), st.booleans())
@settings(max_examples=250, deadline=None)
def test_resumed_run_reads_only_the_remaining_samples(setup, interrupted, world, same_world):
    plain = [sample for batch in plain_loader(setup) for sample in batch.tolist()]
    world = setup["world"] if same_world or setup["split_batches"] else world
    before = prepared(setup)
    seen, taken = [], 0
    for loader in before:
        iterator = iter(loader)
        own = [batch.tolist() for _, batch in zip(range(interrupted), iterator, strict=False)]
        taken = max(taken, len(own))
        seen.append(own)
        del iterator
    if any(len(own) < interrupted for own in seen):
        return  # the epoch had ended
    state = before[0].state_dict()
    resumed = prepared(setup, world)
    for loader in resumed:
        loader.load_state_dict(state)
    done = [sample for i in range(taken) for own in seen for sample in own[i]]
    rest = []
    for step in steps_of(resumed):
        gathered = [sample for part in step if part for sample in part[0]]
        rest += gathered[: next(part[1] for part in step if part) or None]
    done = done[: len(plain)]
    wanted = plain[len(done) :]
    if setup["drop_last"]:
        step = setup["batch"] if setup["split_batches"] else setup["batch"] * world
        assert rest == wanted[: len(rest)]
        assert len(wanted) - len(rest) < step
    else:
        assert rest == wanted


@given(setups(), st.integers(0, 12))
@settings(max_examples=100, deadline=None)
def test_skip_first_batches_skips_on_every_rank(setup, count):
    for whole, part in zip(prepared(setup), prepared(setup), strict=True):
        expected = [batch.tolist() for batch in whole][count:]
        assert [batch.tolist() for batch in skip_first_batches(part, count)] == expected


def samplers(size, seed):
    """Return new instances of PyTorch's samplers, with generators in the same state."""

    def generator():
        return torch.Generator().manual_seed(seed)

    yield lambda: SequentialSampler(range(size))
    if size:
        yield lambda: RandomSampler(range(size), generator=generator())
        yield lambda: RandomSampler(range(size), num_samples=2 * size + 1, generator=generator())
        yield lambda: RandomSampler(range(size), True, 3 * size, generator=generator())
        yield lambda: SubsetRandomSampler(list(range(0, 2 * size, 2)), generator=generator())
        yield lambda: WeightedRandomSampler([1.0] * size, size, generator=generator())
    yield lambda: CustomSampler(size)
    yield lambda: list(range(size))


@given(st.integers(0, 40), st.integers(0, 99), st.lists(st.integers(0, 9), max_size=12), st.data())
@settings(max_examples=150, deadline=None)
def test_cursor_reads_the_same_indices_as_the_sampler(size, seed, moves, data):
    for make in samplers(size, seed):
        sampler, other = make(), make()
        expected = list(sampler)
        cursor, place = cursor_over(other), 0
        assert cursor.first(5) == expected[:5]
        for turn, count in enumerate(moves):
            if turn % 2:
                assert cursor.skip(count) == len(expected[place : place + count])
            else:
                assert cursor.take(count) == expected[place : place + count]
            place += count
        assert cursor.take(200) == expected[place:]
        if getattr(sampler, "generator", None) is not None:
            # A user's generator is in the state that PyTorch would have left it in.
            assert torch.equal(sampler.generator.get_state(), other.generator.get_state())


@given(st.integers(0, 30), st.integers(1, 5), st.booleans(), st.integers(0, 8), st.integers(0, 4))
@settings(max_examples=100, deadline=None)
def test_iteration_can_start_at_any_batch(size, batch, drop_last, start, keep):
    for plan in (BatchSampler(range(size), batch, drop_last), CustomBatchSampler(size, batch)):
        whole = list(plan)
        expected = [*whole[: keep if start else 0], *whole[start:]]
        assert list(iterate_from(plan, start, keep)) == expected


@given(st.integers(0, 30), st.integers(1, 4), st.integers(1, 4), st.booleans())
@settings(max_examples=100, deadline=None)
def test_batches_of_a_custom_batch_sampler_are_not_split(size, batch, world, even):
    whole = list(CustomBatchSampler(size, batch))
    shards = [
        list(BatchSamplerShard(CustomBatchSampler(size, batch), world, rank, even_batches=even))
        for rank in range(world)
    ]
    dealt = [shard[i] for i in range(max(map(len, shards))) for shard in shards if i < len(shard)]
    assert dealt[: len(whole)] == whole
    padding = len(dealt) - len(whole)
    assert padding == (-len(whole) % world if even else 0)
