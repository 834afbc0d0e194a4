"""One of two processes that run the cases of `test_data_distributed.py` together.

Usage: data_worker.py RANK WORLD STORE_FILE. Prints one JSON line: case -> "ok" or a traceback.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accelerate_core.data.loader import DataLoaderDispatcher
from accelerate_core.data.prepare_loader import skip_first_batches
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.distributed.torch_collectives import (
    TorchCollectives,
    bind_collectives,
    host_group,
)
from accelerate_core.training.gradient_state import GradientState
from accelerate_dispatch import DispatchError
from accelerate_dispatch.transport import CollectiveTransport, GroupTransport
from accelerate_drop_in.data_loader import prepare_data_loader

TIMEOUT = timedelta(seconds=30)
RANK, WORLD, STORE = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


class Numbers(IterableDataset):
    def __init__(self, size=10, fail_at=None):
        self.size = size
        self.fail_at = fail_at

    def __iter__(self):
        for i in range(self.size):
            if i == self.fail_at:
                raise OSError(f"cannot read {i}")
            yield i


@dataclass
class Pair:
    one: torch.Tensor
    other: torch.Tensor | None


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def comm(ahead=False):
    return Communicator(
        rank=RANK,
        size=WORLD,
        device=torch.device("cpu"),
        hooks=bind_collectives(TorchCollectives()),
        new_group=(lambda ranks: host_group(ranks, TIMEOUT)) if ahead else None,
    )


# Whether dispatching has a separate process group, so that a thread can read one step ahead.
AHEAD = False


def prepare(loader, **options):
    return prepare_data_loader(loader, None, WORLD, RANK, comm=comm(AHEAD), **options)


def tolist(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def gathered(loader, field=None):
    """Return the samples of all ranks step by step, without the padding."""
    state, out = GradientState(num_steps=1), []
    object.__setattr__(loader, "gradient_state", state)
    for batch in loader:
        part = tolist(batch if field is None else batch[field])
        step = [s for piece in comm().gather_object(part) for s in piece]
        out += step[: state.metrics_cut()[0] or None]
    return out


def epoch(loader):
    """Like `gathered`, but the ranks can have different numbers of batches."""
    state = GradientState(num_steps=1)
    object.__setattr__(loader, "gradient_state", state)
    own = [(batch.tolist(), state.metrics_cut()[0]) for batch in loader]
    ranks = everyone(own)
    out = []
    for i in range(max(map(len, ranks))):
        parts = [rank[i] for rank in ranks if i < len(rank)]
        step = [sample for part, _ in parts for sample in part]
        out += step[: parts[0][1] or None]
    return out


def everyone(value):
    return comm().gather_object(value)


def with_generator(plain):
    """Give the sampler a generator seeded by the first draw, as several ranks get."""
    seed = torch.empty((), dtype=torch.int64).random_().item()
    plain.batch_sampler.sampler.generator = torch.Generator().manual_seed(seed)
    return plain


def same_order_as_plain(build):
    torch.manual_seed(7)
    expected = [sample for batch in with_generator(build()) for sample in tolist(batch)]
    torch.manual_seed(7 if RANK == 0 else 1000 + RANK)
    assert gathered(prepare(build())) == expected


def case_shuffled_order_equals_plain_pytorch():
    same_order_as_plain(lambda: DataLoader(range(11), 3, shuffle=True))


def case_shuffled_order_with_workers_equals_plain_pytorch():
    same_order_as_plain(lambda: DataLoader(range(11), 3, shuffle=True, num_workers=2))


def case_order_with_replacement_equals_plain_pytorch():
    same_order_as_plain(lambda: DataLoader(range(11), 3, sampler=RandomSampler(range(11), True)))


def case_order_of_subset_and_weighted_samplers_equals_plain_pytorch():
    same_order_as_plain(lambda: DataLoader(range(40), 3, sampler=SubsetRandomSampler(range(7, 30))))
    same_order_as_plain(
        lambda: DataLoader(range(9), 3, sampler=WeightedRandomSampler([1.0] * 9, 12))
    )


def case_random_generators_stay_aligned_with_plain_pytorch():
    torch.manual_seed(3)
    loader = prepare(DataLoader(range(11), 3, shuffle=True))
    for _ in range(2):
        list(loader)
    after = everyone(torch.rand(1).item())
    torch.manual_seed(3)
    plain = with_generator(DataLoader(range(11), 3, shuffle=True))
    for _ in range(2):
        list(plain)
    assert after == [torch.rand(1).item()] * WORLD


def case_users_generator_gives_the_same_order_on_all_ranks():
    def build(seed):
        return DataLoader(range(11), 3, shuffle=True, generator=torch.Generator().manual_seed(seed))

    plain, loader = build(0), prepare(build(RANK))
    for _ in range(2):
        assert gathered(loader) == [s for batch in plain for s in batch.tolist()]


def case_torch_generator_is_synchronised_on_request():
    torch.manual_seed(RANK)
    list(prepare(DataLoader(range(4), 2), rng_types=["torch"]))
    drawn = everyone(torch.rand(1).item())
    assert drawn[0] == drawn[-1]
    torch.manual_seed(RANK)
    list(prepare(DataLoader(range(4), 2)))
    drawn = everyone(torch.rand(1).item())
    assert drawn[0] != drawn[-1]
    list(prepare(DataLoader(range(4), 2), rng_types=["cuda"]))


def case_seedable_sampler_uses_seed_0_by_default():
    torch.manual_seed(RANK)
    loader = prepare(DataLoader(range(10), 5, shuffle=True), use_seedable_sampler=True)
    expected = torch.randperm(10, generator=torch.Generator().manual_seed(0)).tolist()
    assert gathered(loader) == expected
    assert gathered(loader) != expected


def case_worker_seeds_differ_between_ranks():
    class Draws:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return random.getrandbits(30)

    generator = torch.Generator().manual_seed(1)
    loader = prepare(DataLoader(Draws(), 1, num_workers=1, shuffle=True, generator=generator))
    drawn = everyone([batch.item() for batch in loader])
    assert drawn[0] != drawn[1]


def case_dispatch_is_the_default_for_streams():
    state = GradientState(num_steps=1)
    data = Numbers(11) if RANK == 0 else Numbers(11, fail_at=0)
    loader = prepare(DataLoader(data, 2), gradient_state=state)
    assert isinstance(loader, DataLoaderDispatcher)
    got = [(b.tolist(), state.end_of_dataloader, state.metrics_cut()[0]) for b in loader]
    expected = [
        [([0, 1], False, 0), ([4, 5], False, 0), ([8, 9], True, 3)],
        [([2, 3], False, 0), ([6, 7], False, 0), ([10, 0], True, 3)],
    ]
    assert got == expected[RANK], got


def case_dispatch_equals_the_reference_for_every_combination_of_options():
    for size in (0, 1, 3, 4, 8, 9, 13):
        for kind in ("map", "stream"):
            for split in (False, True):
                for drop_last in (False, True):
                    for even in (True, False):
                        data = Numbers(size) if kind == "stream" else range(size)
                        loader = prepare(
                            DataLoader(data, 2 + 2 * split, drop_last=drop_last),
                            dispatch_batches=True,
                            split_batches=split,
                            even_batches=even,
                        )
                        whole = size // 4 * 4
                        got = [b.tolist() for b in loader]
                        pieces = everyone(got)
                        flat = [
                            s
                            for i in range(max(map(len, pieces)))
                            for rank in pieces
                            if i < len(rank)
                            for s in rank[i]
                        ]
                        kept = list(range(whole if drop_last else size))
                        case = (size, kind, split, drop_last, even)
                        assert flat[: len(kept)] == kept, (case, pieces)
                        filled = size + size % WORLD  # padded to equal parts
                        wanted = filled if even and not drop_last else len(kept)
                        assert len(flat) == wanted, (case, pieces)


def case_dispatch_with_workers_and_shuffle_keeps_the_order():
    torch.manual_seed(5)
    plain = DataLoader(range(11), 2, shuffle=True, num_workers=2)
    expected = [s for batch in plain for s in batch.tolist()]
    torch.manual_seed(5)
    loader = prepare(DataLoader(range(11), 2, shuffle=True, num_workers=2), dispatch_batches=True)
    assert gathered(loader) == expected


def case_dispatch_sends_strings_and_objects():
    def collate(samples):
        return {
            "text": [f"sample {s}" for s in samples],
            "x": torch.tensor(samples),
            "pair": (torch.tensor(samples).float(), samples[0]),
        }

    for split in (False, True):
        loader = prepare(
            DataLoader(range(9), 2 + 2 * split, collate_fn=collate),
            dispatch_batches=True,
            split_batches=split,
            even_batches=True,
        )
        if split:  # "pair" contains one number per batch, which cannot be sliced
            continue
        texts = gathered(loader, "text")
        assert texts[:8] == [f"sample {s}" for s in range(8)], texts
    words = DataLoader([f"word {i}" for i in range(7)], 4)
    assert gathered(prepare(words, dispatch_batches=True, split_batches=True)) == [
        f"word {i}" for i in range(7)
    ]


def case_dispatch_uses_a_custom_slice_function():
    calls = []

    def mine(data, tensor_slice, process_index=None, num_processes=None):
        calls.append((process_index, num_processes))
        return data[process_index::num_processes]

    loader = prepare(DataLoader(Numbers(8), 2), slice_fn_for_dispatch=mine)
    got = [batch.tolist() for batch in loader]
    assert got == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]][RANK], got
    assert calls == ([(0, 2), (1, 2)] * 2 if RANK == 0 else [])


def failure_of(batches):
    """Return the batches that were read, and the exception that ended the loop."""
    got = []
    try:
        for batch in batches:
            got.append(batch)
    except Exception as error:
        return got, error
    raise AssertionError("no exception was raised")


def case_dispatch_errors_reach_every_rank():
    loader = prepare(DataLoader(Numbers(10, fail_at=6 if RANK == 0 else None), 2))
    got, error = failure_of(loader)
    assert len(got) == 1
    assert type(error) is OSError
    assert "cannot read 6" in str(error)
    assert RANK == 0 or "Raised on process 0" in " ".join(error.__notes__)


def case_dispatch_error_that_cannot_be_unpickled_reaches_every_rank():
    class Broken(IterableDataset):
        def __iter__(self):
            raise Unpicklable("one", "two")

    got, error = failure_of(prepare(DataLoader(Broken(), 2)))
    assert not got
    assert "one and two" in str(error)
    assert type(error) is (Unpicklable if RANK == 0 else DispatchError)


def case_dispatch_reports_batches_that_cannot_be_pickled():
    def collate(samples):
        return [lambda: None for _ in samples]

    got, error = failure_of(prepare(DataLoader(Numbers(4), 2, collate_fn=collate)))
    assert not got
    assert "pickle" in str(error).lower() or "lambda" in str(error)


def case_dispatch_restarts_after_a_break():
    loader = prepare(DataLoader(Numbers(20), 2))
    for _ in range(3):
        for batch in loader:
            assert batch.tolist() == [2 * RANK, 2 * RANK + 1]
            break
    assert len(list(loader)) == 5


def case_dispatch_skips_and_resumes():
    for data in (Numbers(19), range(19)):

        def build(data=data):
            return prepare(DataLoader(data, 2), dispatch_batches=True)

        loader = build()
        whole = [batch.tolist() for batch in loader]
        assert [b.tolist() for b in skip_first_batches(loader, 3)] == whole[3:]
        iterator = iter(loader)
        next(iterator)
        next(iterator)
        saved = loader.state_dict()
        rest = [b.tolist() for b in iterator]
        again = build()
        again.load_state_dict(saved)
        assert [b.tolist() for b in again] == rest == whole[2:]
        assert again.iteration == saved["epoch"] + 1


def case_dispatch_ignores_an_iterator_that_one_rank_never_advances():
    loader = prepare(DataLoader(Numbers(19), 2))
    if RANK == 1:
        idle = iter(loader)
    first = [batch.tolist() for batch in loader]
    if RANK == 1:
        idle.close()
    assert first == [batch.tolist() for batch in loader]


def case_idle_iterator_on_one_rank_does_not_advance_the_shared_generator():
    generator = torch.Generator().manual_seed(RANK)
    data = range(12)
    loader = prepare(DataLoader(data, 2, sampler=RandomSampler(data, generator=generator)))
    if RANK == 1:
        iter(loader)
    mine = [number for batch in loader for number in batch.tolist()]
    assert sorted(number for part in everyone(mine) for number in part) == list(data)


class StatefulStream(Numbers):
    """A stream with a state that also records which threads read it."""

    at = 0

    def __init__(self, size=24):
        super().__init__(size)
        self.threads = set()

    def __iter__(self):
        while self.at < self.size:
            self.threads.add(threading.current_thread().name)
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def case_dispatch_resumes_a_stream_with_a_state():
    for workers in (0, 2):

        def build(workers=workers):
            return prepare(DataLoader(StatefulStream(), 2, num_workers=workers))

        whole = gathered(build())
        for taken in range(1, 5 + workers):
            loader = build()
            iterator = iter(loader)
            seen = [
                s for _ in range(taken) for part in everyone(next(iterator).tolist()) for s in part
            ]
            state = everyone(loader.state_dict())[0]
            iterator.close()
            resumed = build()
            resumed.load_state_dict(state)
            assert seen + gathered(resumed) == whole, (workers, taken)


class RandomStream(StatefulStream):
    def __iter__(self):
        for number in super().__iter__():
            yield number + torch.rand(()).item()


def case_dispatch_reads_ahead_unless_the_dataset_draws_random_numbers():
    for kind, options, on_a_thread in (
        (StatefulStream, {}, AHEAD),
        (RandomStream, {}, False),
        (StatefulStream, {"read_ahead": False}, False),
    ):
        data = kind()
        for _ in prepare(DataLoader(data, 2), **options):
            pass
        if RANK == 0:
            assert ("dispatch" in data.threads) == on_a_thread, (kind, data.threads)
    # The thread reads one step ahead, however the loop ends.
    loader = prepare(DataLoader(RandomStream(), 2))
    for _ in loader:
        break
    rest = prepare(DataLoader(RandomStream(), 2))
    assert len(list(rest)) == 6


def case_dispatch_of_random_data_is_reproducible():
    def run():
        torch.manual_seed(11)
        out = []
        for batch in prepare(DataLoader(RandomStream(), 2)):
            out += [*batch.tolist(), torch.rand(()).item()]
        return out

    assert run() == run()


def case_dispatch_supports_interleaved_loaders():
    one, two = prepare(DataLoader(Numbers(12), 2)), prepare(DataLoader(Numbers(24), 4))
    pairs = [(x.tolist(), y.tolist()) for x, y in zip(one, two, strict=True)]
    first = 2 * RANK
    assert pairs[0] == ([first, first + 1], list(range(4 * RANK, 4 * RANK + 4)))
    assert len(pairs) == 3


def case_dispatch_sends_batches_whose_structure_changes():
    """Shapes, dtypes, containers and sizes differ from step to step."""

    def batches():
        for i in range(12):
            size = 50_000 if i // 2 in (2, 4) else 3
            batch = {"x": torch.full((2, size), float(i)), "n": [f"{i}a", f"{i}b"]}
            if i // 2 == 3:
                batch = (
                    torch.full((2, 5), i, dtype=torch.int8),
                    torch.ones(2, 2, dtype=torch.bool),
                )
            if i // 2 == 5:
                batch = Pair(torch.full((2, 1), i, dtype=torch.bfloat16), None)
            yield batch

    class Batches(IterableDataset):
        def __iter__(self):
            return batches()

    expected = list(batches())[RANK::WORLD]
    got = list(prepare(DataLoader(Batches(), batch_size=None, collate_fn=lambda batch: batch)))
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert type(a) is type(b)
        if isinstance(b, dict):
            assert torch.equal(a["x"], b["x"])
            assert a["n"] == b["n"]
        elif isinstance(b, Pair):
            assert torch.equal(a.one, b.one)
            assert a.other is None
        else:
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


SETUPS = {
    "size": st.integers(0, 30),
    "batch": st.integers(1, 4),
    "split": st.booleans(),
    "drop_last": st.booleans(),
    "even": st.booleans(),
    "kind": st.sampled_from(["order", "shuffle", "stream"]),
    "taken": st.integers(0, 6),
}


def case_dispatch_covers_the_epoch_for_random_options():
    """All ranks draw the same examples. Each sample is read once, even if the epoch is interrupted."""

    @given(**SETUPS)
    @settings(
        max_examples=120,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),  # they measure time, which differs between ranks
    )
    def check(size, batch, split, drop_last, even, kind, taken):
        def build():
            data = Numbers(size) if kind == "stream" else range(size)
            sampler = None
            if kind == "shuffle" and size > 0:
                sampler = RandomSampler(data, generator=torch.Generator().manual_seed(3))
            each = batch * WORLD if split else batch
            return DataLoader(data, each, sampler=sampler, drop_last=drop_last)

        def ours():
            return prepare(build(), dispatch_batches=True, split_batches=split, even_batches=even)

        plain = [sample for one in build() for sample in one.tolist()]
        seen = epoch(ours())
        step = batch * WORLD
        assert seen == (plain[: len(plain) // step * step] if drop_last else plain)

        loader, done = ours(), []
        iterator = iter(loader)
        for _ in range(taken):
            one = next(iterator, None)
            parts = everyone([] if one is None else one.tolist())
            done += [sample for part in parts for sample in part]
        state = loader.state_dict()
        iterator.close()
        if taken * step >= len(plain):
            return
        resumed = ours()
        resumed.load_state_dict(state)
        assert done + epoch(resumed) == seen

    check()


def case_dispatch_never_reads_on_two_threads_at_once():
    """Callers are slow, fast or stop early, and the thread and the caller never read at the same time."""
    draw = random.Random(5)
    for _ in range(60):
        size, stop = draw.randrange(80), draw.choice([None, None, draw.randrange(12)])
        pace = draw.choice([0.0, 0.0005, None])
        own = []
        for index, batch in enumerate(prepare(DataLoader(Numbers(size), 3))):
            own += batch.tolist()
            wait = draw.choice([0.0, 0.0005]) if pace is None else pace
            if wait:
                time.sleep(wait)
            if index == stop:
                break
        steps = -(-size // (3 * WORLD))
        taken = steps if stop is None else min(stop + 1, steps)
        wanted = [
            number % size
            for step in range(taken)
            for number in range((step * WORLD + RANK) * 3, (step * WORLD + RANK) * 3 + 3)
        ]
        if taken and taken == steps and size % (3 * WORLD):
            del wanted[-3:], own[len(wanted) :]  # padding is checked elsewhere
        assert own == wanted, (size, stop)


def case_dispatch_sends_the_structure_once():
    loader = prepare(DataLoader([(torch.ones(64), i) for i in range(40)], 2), dispatch_batches=True)
    sizes = []
    kind = GroupTransport if AHEAD else CollectiveTransport
    send = kind.send

    def counted(transport, rows):
        sizes.append(len(rows[0]))
        send(transport, rows)

    kind.send = counted
    try:
        assert len(list(loader)) == 10
    finally:
        kind.send = send
    if RANK == 0:
        assert len(sizes) == 10, sizes  # one per step, because header, structure and data fit
        assert len(set(sizes)) == 1


def case_shuffled_loader_resumes_on_every_rank():
    torch.manual_seed(RANK)
    loader = prepare(DataLoader(range(21), 2, shuffle=True))
    list(loader)
    got, saved = [], None
    for batch in loader:
        got.append(batch.tolist())
        if len(got) == 2:
            saved = loader.state_dict()
    torch.manual_seed(50 + RANK)
    again = prepare(DataLoader(range(21), 2, shuffle=True))
    again.load_state_dict(everyone(saved)[0])
    assert [b.tolist() for b in again] == got[2:]


def case_each_rank_reads_a_stream_itself_without_dispatching():
    for workers in (0, 2):
        loader = prepare(DataLoader(Numbers(7), 2, num_workers=workers), dispatch_batches=False)
        kept = gathered(loader)
        assert sorted(set(kept)) == list(range(7)), kept
        assert len(kept) == 7 * (workers or 1), kept


def case_loader_of_another_class_can_be_prepared():
    class Foreign:
        dataset = range(7)

        def __iter__(self):
            return iter(torch.arange(7).split(2))

        def __len__(self):
            return 4

    for dispatch in (None, True):
        loader = prepare(Foreign(), dispatch_batches=dispatch)
        assert gathered(loader) == list(range(7))
        assert len(loader) == len(list(loader)) == 2


def case_ranks_of_one_replica_read_the_same_samples():
    """Both ranks read the same samples, as ranks of one model replica do."""
    loader = prepare_data_loader(DataLoader(Numbers(8), 2), None, 1, 0, comm=comm())
    assert len(list(loader)) == 4


def main():
    dist.init_process_group(
        "gloo",
        init_method=f"file://{STORE}",
        rank=RANK,
        world_size=WORLD,
        timeout=TIMEOUT,
    )
    results = {}
    global AHEAD
    cases = [(name, case) for name, case in sorted(globals().items()) if name.startswith("case_")]
    runs = [(name, case, False) for name, case in cases]
    runs += [(f"{name}_ahead", case, True) for name, case in cases if "_dispatch_" in name]
    for name, case, ahead in runs:
        AHEAD = ahead
        try:
            case()
            results[name] = "ok"
        except Exception:
            results[name] = traceback.format_exc()
        comm().barrier()  # a case that fails on one rank must not affect the next
    print(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
