"""One process of a small gloo group: runs every case and writes the results.

Called as `collectives_worker.py RANK SIZE STORE REPORT`. All ranks run
all cases in the order of this file, and each writes `{case: "" or traceback}` to `REPORT.RANK`.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from accelerate_core.distributed.collectives import (
    broadcast,
    check_objects,
    gather,
    gather_object,
    gather_uneven,
    pad_across_processes,
    reduce,
)
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.distributed.torch_collectives import TorchCollectives, bind_collectives
from accelerate_core.distributed.tree import map_leaves
from accelerate_core.errors import DistributedOperationException
from accelerate_drop_in.verbs import broadcast_object_list, copy_tensor_to_devices

Case = Callable[[Communicator], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


class Counting:
    """Collective hooks that record which of them are called."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        hook = getattr(self._inner, name)

        @wraps(hook)
        def counted(*args: Any) -> Any:
            self.calls.append(name)
            return hook(*args)

        return counted


class WithoutAvg(TorchCollectives):
    """Collectives of a group without an average operation."""

    def __init__(self) -> None:
        super().__init__()
        self._without_avg = frozenset(("world", dtype) for dtype in FLOATS)


class Pair(NamedTuple):
    first: Any
    second: Any


class Batch(OrderedDict[str, Any]):
    """A dict subclass with an extra attribute."""

    origin = "nowhere"


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*FLOATS, *INTEGERS, *FLOAT8, *COMPLEX, torch.bool]


def counted(comm: Communicator, **more: Any) -> tuple[Communicator, list[str]]:
    hooks = Counting(comm.hooks)
    again = Communicator(rank=comm.rank, size=comm.size, device=comm.device, hooks=hooks, **more)
    return again, hooks.calls


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert torch.equal(*(t.to(torch.complex128) for t in (actual, expected))), (actual, expected)


def sample(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    values = torch.arange(torch.Size(shape).numel()).reshape(shape) % 5 + rank + 1
    if dtype == torch.bool:
        return (values + rank) % 2 == 0
    return (values * (1 + 0.5j)).to(dtype) if dtype.is_complex else values.to(dtype)


def joined(size: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    rows = [sample(rank, dtype, *shape) for rank in range(size)]
    return torch.stack(rows) if not shape else torch.cat(rows)


# --- the communicator -----------------------------------------------------------------------------


@case
def collectives_on_tensors(comm: Communicator) -> None:
    ranks = torch.arange(comm.size)
    own = torch.tensor([comm.rank])
    same(comm.gather(own), ranks)
    same(comm.reduce(own), ranks.sum()[None])
    same(comm.reduce(own, "max"), torch.tensor([comm.size - 1]))
    same(comm.reduce(own, "min"), torch.tensor([0]))
    same(own, torch.tensor([comm.rank]))
    same(comm.reduce(own, "mean"), ranks.float().mean()[None])
    same(comm.reduce(own.float(), "mean"), ranks.float().mean()[None])
    same(comm.broadcast(own.clone(), src=1), torch.tensor([1]))
    same(comm.all_to_all(ranks + 10 * comm.rank), 10 * ranks + comm.rank)
    parts = list(ranks.double()[:, None]) if comm.rank == 1 else None
    same(comm.scatter(parts, torch.zeros(1).double(), src=1), own.double())
    comm.barrier()


@case
def collectives_on_objects(comm: Communicator) -> None:
    assert comm.gather_object({"rank": comm.rank}) == [{"rank": r} for r in range(comm.size)]
    assert comm.broadcast_object(("from", comm.rank), src=1) == ("from", 1)
    objs = [f"for {r}" for r in range(comm.size)] if comm.rank == 1 else None
    assert comm.scatter_object(objs, src=1) == f"for {comm.rank}"


@case
def collectives_accept_float8(comm: Communicator) -> None:
    for dtype in FLOAT8:
        same(comm.gather(sample(comm.rank, dtype, 3)), joined(comm.size, dtype, 3))
        same(comm.broadcast(sample(comm.rank, dtype, 3), 1), sample(1, dtype, 3))


@case
def mean_works_without_an_average_operation(comm: Communicator) -> None:
    plain = Communicator(
        rank=comm.rank, size=comm.size, device=comm.device, hooks=bind_collectives(WithoutAvg())
    )
    for dtype in FLOATS:
        own = torch.full((3,), float(comm.rank * 2), dtype=dtype)
        same(plain.reduce(own, "mean"), torch.full((3,), comm.size - 1.0, dtype=dtype))


@case
def scope_uses_its_own_group(comm: Communicator) -> None:
    pair = dist.new_group([0, 1])
    if comm.rank > 1:
        return

    class Scoped(TorchCollectives):
        def scope_group(self, scope: Any) -> Any:
            return pair if scope == "data" else None

    scoped = Scoped()
    inner = Communicator(
        rank=comm.rank, size=2, device=comm.device, hooks=bind_collectives(scoped), scope="data"
    )
    same(gather(torch.tensor([comm.rank]), inner), torch.tensor([0, 1]))
    assert inner.gather_object(comm.rank) == [0, 1]


@case
def reversed_group_orders_results_by_its_own_ranks(comm: Communicator) -> None:
    order = list(reversed(range(comm.size)))
    group = dist.new_group(order, use_local_synchronization=False)
    rank = dist.get_rank(group)
    inner = Communicator(
        rank=rank,
        size=comm.size,
        device=comm.device,
        hooks=bind_collectives(TorchCollectives(group)),
    )
    same(inner.broadcast(torch.tensor([rank]), src=1), torch.tensor([1]))
    assert inner.broadcast_object(rank, src=1) == 1
    assert inner.scatter_object(list(range(comm.size)), src=1) == rank


# --- gather ---------------------------------------------------------------------------------------


@dataclass
class Scores:
    values: torch.Tensor
    names: dict[str, torch.Tensor]
    extra: torch.Tensor | None = None


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


@case
def gather_walks_dataclasses(comm: Communicator) -> None:
    own = Scores(torch.full((2,), comm.rank), {"a": torch.tensor(comm.rank)})
    own.extra = torch.ones(1)
    tree = [own, Frozen(torch.tensor([comm.rank]))]
    watched, calls = counted(comm)
    scores, frozen = gather(tree, watched)
    assert calls == ["gather"]
    assert isinstance(scores, Scores)
    assert isinstance(frozen, Frozen)
    same(scores.values, torch.arange(comm.size).repeat_interleave(2))
    same(scores.names["a"], torch.arange(comm.size))
    same(frozen.x, torch.arange(comm.size))
    same(own.values, torch.full((2,), comm.rank))  # the input is unchanged


@case
def gather_keeps_every_dtype(comm: Communicator) -> None:
    for dtype in DTYPES:
        same(gather(sample(comm.rank, dtype, 3, 2), comm), joined(comm.size, dtype, 3, 2))
        same(gather(sample(comm.rank, dtype), comm), joined(comm.size, dtype))


@case
def gather_sends_all_dtypes_in_one_collective(comm: Communicator) -> None:
    watched, calls = counted(comm)
    shapes = [(3,), (), (2, 3), (0, 4), (1, 1, 1), (5, 0)]
    wanted = [(dtype, shapes[i % len(shapes)]) for i, dtype in enumerate(DTYPES)]
    assert len(wanted) >= 15
    tree = {"all": [sample(comm.rank, dtype, *shape) for dtype, shape in wanted]}
    result = gather(tree, watched)
    assert calls == ["gather"]
    for tensor, (dtype, shape) in zip(result["all"], wanted, strict=True):
        same(tensor, joined(comm.size, dtype, *shape))


@case
def gather_keeps_container_types(comm: Communicator) -> None:
    batch = Batch(x=torch.ones(1), y=(torch.ones(1), [torch.ones(2)]))
    batch.origin = "here"
    table: dict[str, Any] = defaultdict(list, {"z": torch.ones(1)})
    result = gather(Pair(batch, table), comm)
    assert type(result) is Pair
    assert type(result.first) is Batch
    assert result.first.origin == "here"
    assert type(result.first["y"]) is tuple
    assert type(result.first["y"][1]) is list
    assert result.second.default_factory is list
    assert len(batch["x"]) == 1, "the input was changed"
    same(result.first["y"][1][0], torch.ones(2 * comm.size))


@case
def gather_accepts_non_contiguous_tensors(comm: Communicator) -> None:
    base = sample(comm.rank, torch.float32, 4, 6)
    every = [sample(rank, torch.float32, 4, 6) for rank in range(comm.size)]
    same(gather(base.T, comm), torch.cat([t.T for t in every]))
    same(gather(base[:, ::2], comm), torch.cat([t[:, ::2] for t in every]))
    same(gather(base[1:, 1:], comm), torch.cat([t[1:, 1:] for t in every]))
    both = gather([base[0:1].expand(3, 6), base.T], comm)
    same(both[0], torch.cat([t[0:1].expand(3, 6) for t in every]))
    same(both[1], torch.cat([t.T for t in every]))
    z = sample(comm.rank, torch.complex64, 3)
    same(gather(z.conj(), comm), joined(comm.size, torch.complex64, 3).conj().resolve_conj())
    same(gather(z.conj().imag, comm), joined(comm.size, torch.complex64, 3).conj().imag)


@case
def gather_detaches_results_and_leaves_the_input_unchanged(comm: Communicator) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    for tree in (weight, [weight * 2, weight], [weight.sum()]):
        result = gather(tree, comm)
        flat = result if isinstance(result, list) else [result]
        assert not any(t.requires_grad for t in flat)
    assert weight.requires_grad


@case
def gather_accepts_empty_structures(comm: Communicator) -> None:
    watched, calls = counted(comm)
    assert gather({}, watched) == {}
    assert gather([], watched) == []
    assert calls == ["gather"] * 2  # other ranks may have tensors
    same(gather(torch.zeros(0, 3), comm), torch.zeros(0, 3))


@case
def gather_refuses_objects_without_tensors(comm: Communicator) -> None:
    with pytest.raises(TypeError, match=r"not a str at \['b'\]\[0\].*gather_object"):
        gather({"a": torch.ones(1), "b": ["text"]}, comm)
    with pytest.raises(TypeError, match="NoneType"):
        gather(None, comm)
    with pytest.raises(TypeError, match="dense"):
        gather(torch.eye(2).to_sparse(), comm)


@case
def gather_results_do_not_share_memory(comm: Communicator) -> None:
    first, second = gather([torch.ones(2), torch.ones(3)], comm)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


@case
def gather_uneven_joins_different_lengths(comm: Communicator) -> None:
    watched, calls = counted(comm)
    own = comm.rank + 1
    tree = {
        "x": sample(comm.rank, torch.float64, own, 2),
        "flag": sample(comm.rank, torch.bool, own),
        "loss": sample(comm.rank, torch.float32),
        "tail": sample(comm.rank, torch.int16, comm.rank),
    }
    result = gather_uneven(tree, watched)
    assert calls == ["gather", "gather"]
    ranks = range(comm.size)
    same(result["x"], torch.cat([sample(r, torch.float64, r + 1, 2) for r in ranks]))
    same(result["flag"], torch.cat([sample(r, torch.bool, r + 1) for r in ranks]))
    same(result["loss"], joined(comm.size, torch.float32))
    same(result["tail"], torch.cat([sample(r, torch.int16, r) for r in ranks]))
    alone = gather_uneven(sample(comm.rank, torch.int8, own), comm)
    same(alone, torch.cat([sample(r, torch.int8, r + 1) for r in ranks]))


@case
def gather_uneven_accepts_equal_lengths(comm: Communicator) -> None:
    same(gather_uneven(sample(comm.rank, torch.int32, 3), comm), joined(comm.size, torch.int32, 3))


# --- reduce ---------------------------------------------------------------------------------------


def over_ranks(size: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.stack([sample(rank, dtype, *shape).to(wide) for rank in range(size)])


@case
def reduce_sums_every_dtype(comm: Communicator) -> None:
    for dtype in DTYPES:
        total = over_ranks(comm.size, dtype, 3, 2).sum(0)
        expected = total.to(dtype) if dtype != torch.bool else total > 0
        same(reduce(sample(comm.rank, dtype, 3, 2), comm=comm), expected)


@case
def reduce_computes_the_mean_of_every_dtype(comm: Communicator) -> None:
    for dtype in DTYPES:
        result = reduce(sample(comm.rank, dtype, 5), "mean", comm=comm)
        inexact = dtype.is_floating_point or dtype.is_complex
        assert result.dtype == (dtype if inexact else torch.float32), dtype
        expected = over_ranks(comm.size, dtype, 5).mean(0).to(result.dtype)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        torch.testing.assert_close(result.to(wide), expected.to(wide), rtol=8e-3, atol=1e-6)


@case
def mean_of_small_integers_does_not_overflow(comm: Communicator) -> None:
    same(
        reduce(torch.full((2,), 120, dtype=torch.int8), "mean", comm=comm), torch.full((2,), 120.0)
    )


@case
def reduce_computes_minimum_and_maximum(comm: Communicator) -> None:
    for dtype in (*FLOATS, *INTEGERS[:7], torch.bool):
        values = over_ranks(comm.size, dtype, 4)
        for op, expected in (("max", values.amax(0)), ("min", values.amin(0))):
            same(reduce(sample(comm.rank, dtype, 4), op, comm=comm), expected.to(dtype))
    with pytest.raises(TypeError, match="complex"):
        reduce(torch.ones(1, dtype=torch.complex64), "max", comm=comm)


@case
def reduce_uses_one_collective_per_dtype(comm: Communicator) -> None:
    watched, calls = counted(comm)
    tree = [sample(comm.rank, d, 2) for d in (torch.float32, torch.int64, torch.float64) * 3]
    result = reduce(tree, "sum", comm=watched)
    assert calls == ["reduce"] * 3
    for tensor, own in zip(result, tree, strict=True):
        same(tensor, over_ranks(comm.size, own.dtype, 2).sum(0).to(own.dtype))


@case
def reduce_supports_none_and_scale_and_refuses_typos(comm: Communicator) -> None:
    own = torch.tensor([float(comm.rank)], requires_grad=True)
    tree = {"loss": own}
    assert reduce(tree, "none", comm=comm) is tree
    total = reduce(tree, scale=0.5, comm=comm)["loss"]
    same(total, torch.tensor([sum(range(comm.size)) / 2.0]))
    assert not total.requires_grad
    same(own.detach(), torch.tensor([float(comm.rank)]))
    with pytest.raises(ValueError, match=r"reduction='men'.*Did you mean 'mean'"):
        reduce(tree, "men", comm=comm)


@case
def reduce_results_do_not_share_memory(comm: Communicator) -> None:
    first, second = reduce([torch.ones(2), torch.ones(3)], comm=comm)
    assert first.untyped_storage().nbytes() == 8
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


# --- broadcast and others ------------------------------------------------------------------------


@case
def broadcast_sends_any_structure_in_one_collective(comm: Communicator) -> None:
    watched, calls = counted(comm)
    tree = Batch({str(dtype): sample(comm.rank, dtype, 3) for dtype in DTYPES})
    broadcast(torch.ones(1), comm=watched)  # so that messages are bytes from now on
    calls.clear()
    result = broadcast(tree, from_process=1, comm=watched)
    assert calls == ["reduce"]  # in which the other ranks contribute zeros
    assert type(result) is Batch
    for dtype in DTYPES:
        same(result[str(dtype)], sample(1, dtype, 3))
        assert result[str(dtype)] is tree[str(dtype)], "the list was not updated in place"


@case
def broadcast_writes_in_place_if_possible(comm: Communicator) -> None:
    base = sample(comm.rank, torch.float32, 4, 6)
    assert broadcast(base.T[::2], comm=comm).shape == (3, 4)
    same(base[:, ::2], sample(0, torch.float32, 4, 6)[:, ::2])
    same(base[:, 1::2], sample(comm.rank, torch.float32, 4, 6)[:, 1::2])
    weight = torch.nn.Parameter(torch.full((2,), float(comm.rank)))
    assert broadcast(weight, comm=comm) is weight
    same(weight.detach(), torch.zeros(2))
    wide = torch.tensor([comm.rank]).expand(3)
    same(broadcast(wide, 1, comm=comm), torch.ones(3, dtype=torch.int64))
    same(broadcast(torch.tensor(comm.rank), 1, comm=comm), torch.tensor(1))


@case
def collectives_refuse_an_invalid_rank(comm: Communicator) -> None:
    with pytest.raises(ValueError, match=f"from_process={comm.size}; with"):
        broadcast(torch.ones(1), comm.size, comm=comm)


@case
def tensor_of_one_process_is_copied_to_all(comm: Communicator) -> None:
    own = sample(1, torch.float64, 2, 3) if comm.rank == 1 else None
    same(copy_tensor_to_devices(own, comm=comm), sample(1, torch.float64, 2, 3))
    with pytest.raises(DistributedOperationException, match="none did"):
        copy_tensor_to_devices(None, comm=comm)
    with pytest.raises(DistributedOperationException, match="processes 0, 1"):
        copy_tensor_to_devices(torch.ones(1), comm=comm)


@case
def tensors_are_padded_to_the_longest(comm: Communicator) -> None:
    watched, calls = counted(comm)
    own, longest = comm.rank + 1, comm.size
    tree = {"ids": torch.full((2, own), 5), "loss": torch.tensor(1.0), "same": torch.ones(2, 2)}
    for dim in (1, -1):
        for first in (False, True):
            calls.clear()
            result = pad_across_processes(tree, dim, -100, pad_first=first, comm=watched)
            assert calls == ["gather"]
            old, new = [5] * own, [-100] * (longest - own)
            same(result["ids"], torch.tensor([new + old if first else old + new] * 2))
            assert result["loss"] is tree["loss"]
            assert result["same"] is tree["same"]
    flags = pad_across_processes(torch.ones(own, 2, dtype=torch.bool), comm=comm)
    same(flags, torch.arange(longest)[:, None].lt(own).expand(longest, 2))
    same(gather(result["ids"], comm)[:, -1], torch.full((2 * comm.size,), 5))


@case
def tensors_are_padded_along_several_dimensions(comm: Communicator) -> None:
    own = comm.rank + 1
    watched, calls = counted(comm)
    tree = {"image": torch.full((own, 2, 2 * own), own), "flat": torch.ones(own)}
    padded = pad_across_processes(tree, (0, -1), 7, comm=watched)
    assert calls == ["gather"]
    expected = torch.full((comm.size, 2, 2 * comm.size), 7)
    expected[:own, :, : 2 * own] = own
    same(padded["image"], expected)
    # Dimensions 0 and -1 are the same here, and become as long as the longest.
    assert padded["flat"].tolist() == [1.0] * own + [7.0] * (comm.size - own)
    assert len(gather(padded, comm)["image"]) == comm.size**2


@case
def tensors_can_be_padded_along_one_dimension_after_the_other(comm: Communicator) -> None:
    own = torch.full((comm.rank + 1, comm.rank + 2), 5)
    for first in (0, 1):
        padded = pad_across_processes(own, first, -1, comm=comm)
        padded = pad_across_processes(padded, 1 - first, -1, comm=comm)
        expected = torch.full((comm.size, comm.size + 1), -1)
        expected[: comm.rank + 1, : comm.rank + 2] = 5
        same(padded, expected)
    # Padding does not need equal dtypes or numbers of dimensions.
    mixed = torch.ones(*[comm.rank + 1] * (1 + comm.rank % 2), dtype=FLOATS[comm.rank % 2])
    assert len(pad_across_processes(mixed, comm=comm)) == comm.size
    scalar_or_vector = torch.ones(()) if comm.rank else torch.ones(1)
    refused(
        "pad_across_processes",
        lambda: pad_across_processes(scalar_or_vector, comm=comm),
        "process 0: [1] float32",
        "process 1: [] float32",
    )


@case
def padding_keeps_gradients_and_warns_about_nested_tensors(comm: Communicator) -> None:
    weight = torch.ones(comm.rank + 1, requires_grad=True)
    pad_across_processes(weight, comm=comm).sum().backward()
    assert weight.grad is not None
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert pad_across_processes(nested, comm=comm) is nested
    assert any("nested tensor" in str(w.message) for w in seen)
    with pytest.raises(TypeError, match=r"pad_across_processes.*not a str"):
        pad_across_processes(["text"], comm=comm)


@case
def objects_are_gathered_into_one_list(comm: Communicator) -> None:
    ranks = list(range(comm.size))
    assert gather_object([comm.rank], comm) == ranks
    assert gather_object([None] * comm.rank, comm) == [None] * sum(ranks)
    assert gather_object((comm.rank, "x"), comm) == [v for r in ranks for v in (r, "x")]
    assert gather_object((v for v in [comm.rank]), comm) == ranks
    assert gather_object({"rank": comm.rank}, comm) == [{"rank": r} for r in ranks]
    assert gather_object("ab", comm) == ["ab"] * comm.size
    assert gather_object(comm.rank, comm) == ranks
    rows = gather_object([torch.full((comm.rank,), 1.0)], comm)
    assert [len(row) for row in rows] == ranks
    assert len(gather_object(torch.ones(2), comm)) == 2 * comm.size
    assert len(gather_object(torch.tensor(1.0), comm)) == comm.size


@case
def list_of_objects_is_broadcast_in_place(comm: Communicator) -> None:
    own = [comm.rank, {"rank": comm.rank}]
    assert broadcast_object_list(own, 1, comm=comm) is own
    assert own == [1, {"rank": 1}]
    longer = [0] * (2 if comm.rank == 1 else 1)
    if comm.rank == 0:
        assert broadcast_object_list(longer, comm=comm) == [0]
    elif comm.rank == 1:
        with pytest.raises(DistributedOperationException, match="sent 1 objects"):
            broadcast_object_list(longer, comm=comm)
    else:
        broadcast_object_list(longer, comm=comm)


# --- structures that differ -----------------------------------------------------------------------


def refused(verb: str, call: Callable[[], Any], *texts: str) -> None:
    with pytest.raises(DistributedOperationException) as caught:
        call()
    message = str(caught.value)
    assert message.startswith(f"{verb}: "), message
    missing = [text for text in texts if text not in message]
    assert not missing, (missing, message)


VERBS: dict[str, Callable[[Any, Communicator], Any]] = {
    "gather": gather,
    "gather_uneven": gather_uneven,
    "reduce": lambda tree, comm: reduce(tree, comm=comm),
    "broadcast": lambda tree, comm: broadcast(tree, 1, comm=comm),
    "pad_across_processes": lambda tree, comm: pad_across_processes(tree, comm=comm),
}
ONE = torch.ones(1)
#: What the ranks before the last one and the last one pass.
MISMATCHES: dict[str, tuple[Any, Any]] = {
    "keys": ({"loss": ONE, "a": ONE}, {"loss": ONE, "b": ONE}),
    "missing key": ({"loss": ONE, "a": ONE}, {"loss": ONE}),
    "other keys that are not strings": ({1: ONE, 2: ONE}, {1: ONE, 3: ONE}),
    "nested keys": ([{"x": {"y": ONE}}], [{"x": {"z": ONE}}]),
    "no tensor": ({"a": ONE}, {}),
    "tuple lengths": ((ONE, ONE), (ONE,)),
    "named tuple and dict": (Pair(ONE, ONE), {"first": ONE, "second": ONE}),
    "dataclasses": (Scores(ONE, {}, ONE), Frozen(ONE)),
    "tensor and container": (ONE, [ONE]),
    "None": (ONE, None),
    "None in a dict": ({"a": ONE, "b": ONE}, {"a": ONE, "b": None}),
    "sparse": (torch.eye(2), torch.eye(2).to_sparse()),
}
#: Padding is possible with these.
DTYPES_AND_SHAPES: dict[str, tuple[Any, Any]] = {
    "bytes": (torch.ones(2, dtype=torch.float64), torch.ones(4)),
    "floats and integers": (ONE, torch.ones(1, dtype=torch.int32)),
    "halves": (ONE.half(), ONE.bfloat16()),
    "float8": (torch.ones(2).to(FLOAT8[0]), torch.ones(2).to(FLOAT8[1])),
    "complex": (torch.ones(1, dtype=torch.complex64), torch.ones(1, dtype=torch.float64)),
    "bool": (torch.ones(3, dtype=torch.bool), torch.ones(3, dtype=torch.uint8)),
    "transposed": (torch.ones(2, 3), torch.ones(3, 2)),
    "scalar": (torch.tensor(1.0), torch.ones(1, 1)),
    "large dtypes": (torch.ones(2**18), torch.ones(2**18, dtype=torch.int32)),
    "one is large": ({"x": ONE}, {"x": torch.ones(2**19, 2)}),
    "empty": ({"x": torch.ones(0, 2)}, {"x": torch.ones(0, 3)}),
}
LENGTHS: dict[str, tuple[Any, Any]] = {
    "lengths": (torch.ones(2), torch.ones(3)),
    "lengths of bytes": ([torch.ones(5, dtype=torch.int8)], [torch.ones(3, dtype=torch.int8)]),
    "one is empty": (torch.ones(0), torch.ones(2)),
    "large lengths": (torch.ones(3 * 2**18), torch.ones(3 * 2**18 + 1)),
    "both large": ((torch.ones(2**16), ONE), (torch.ones(2**15), ONE)),
}


@case
def mismatches_are_noticed_at_any_call_on_all_ranks(comm: Communicator) -> None:
    for verb, call in VERBS.items():
        cases = dict(MISMATCHES)
        if verb != "pad_across_processes":
            cases |= DTYPES_AND_SHAPES
        if verb not in ("pad_across_processes", "gather_uneven"):
            cases |= LENGTHS
        watched, calls = counted(comm)
        for number, (name, trees) in enumerate(cases.items()):
            for valid in (torch.ones(2, number), {"b": ONE.double(), "a": torch.ones(4000)})[
                : number % 3
            ]:
                call(valid, watched)  # so that the mismatch is not the first call
            calls.clear()
            differs = comm.rank == comm.size - 1
            for _ in range(2):
                refused(verb, lambda: call(trees[differs], watched), "process 0: ", "process 1: ")  # noqa: B023
            assert len(calls) == 4, (verb, name, calls)  # one message, and the exchange of reports
    same(gather(torch.tensor([comm.rank]), comm), torch.arange(comm.size))


@case
def mismatches_in_reductions_of_any_dtype_and_operation_are_noticed(comm: Communicator) -> None:
    for dtype in DTYPES:
        for op in ("sum", "mean", "max", "min"):
            if dtype.is_complex and op in ("max", "min"):
                continue
            watched, _ = counted(comm)
            reduce(torch.ones(2, 2).to(dtype), op, comm=watched)
            tree = torch.ones(2 + comm.rank // (comm.size - 1), 2).to(dtype)
            refused("reduce", lambda: reduce(tree, op, comm=watched), "[2, 2]", "[3, 2]")  # noqa: B023
            reduce(torch.ones(2, 2).to(dtype), op, comm=watched)


@case
def different_operations_and_verbs_are_noticed(comm: Communicator) -> None:
    tree = {"x": ONE}
    last = comm.rank == comm.size - 1
    op = "max" if last else "sum"
    refused("reduce", lambda: reduce(tree, op, comm=comm), "reduce(sum) of ['x']", "reduce(max) of")
    src = 1 if last else 0
    call = lambda: broadcast(tree, src, comm=comm)  # noqa: E731
    refused("broadcast", call, "broadcast(from_process=0) of", "broadcast(from_process=1) of")
    dim = 1 if last else 0
    call = lambda: pad_across_processes(torch.ones(2, 2), dim, comm=comm)  # noqa: E731
    refused("pad_across_processes", call, "(dim=[0]) of [2, 2]", "(dim=[1]) of [2, 2]")
    verb = "gather_uneven" if last else "gather"
    refused(verb, lambda: VERBS[verb](tree, comm), "gather of ['x']", "gather_uneven of ['x']")


@case
def objects_instead_of_tensors_on_some_ranks_are_noticed(comm: Communicator) -> None:
    """`gather_for_metrics` gathers a structure with other objects than tensors in another way."""
    gather(ONE, comm)
    last = comm.rank == comm.size - 1
    verb = "gather_for_metrics" if last else "gather"
    call = partial(check_objects, comm) if last else partial(gather, ONE, comm)
    refused(verb, call, "gather of [1] float32", "gather_for_metrics of <not only tensors>")


@case
def mappings_are_matched_by_their_keys(comm: Communicator) -> None:
    keys = ["loss", "acc", "b", "a"]
    order = keys[comm.rank % 3 :] + keys[: comm.rank % 3]
    values = {key: torch.tensor([10.0 * number]) for number, key in enumerate(keys)}
    inner = Batch((key, values[key] + comm.rank) for key in order)
    tree = {"outer": [inner], "alone": torch.tensor(comm.rank)}
    if comm.rank:
        tree = dict(reversed(tree.items()))
    ranks = torch.arange(comm.size)
    results: dict[str, Callable[[Any], Any]] = {
        "gather": lambda value: value + ranks,
        "gather_uneven": lambda value: value + ranks,
        "reduce": lambda value: value * comm.size + ranks.sum(),
        "broadcast": lambda value: value + 1,
        "pad_across_processes": lambda value: value + comm.rank,
    }
    for verb, expected in results.items():
        result = VERBS[verb](map_leaves(torch.clone, tree), comm)
        assert list(result) == list(tree), verb
        assert type(result["outer"][0]) is Batch
        assert list(result["outer"][0]) == order, verb
        for key, value in result["outer"][0].items():
            same(value, expected(values[key]))
    by_number = {1 + comm.rank % 2: ONE, 2 - comm.rank % 2: ONE}
    refused("gather", lambda: gather(by_number, comm), "[1] [1] float32, [2] [1]")


@case
def calls_in_a_loop_need_one_collective_each(comm: Communicator) -> None:
    watched, calls = counted(comm)
    logits = torch.ones(64, 500)  # larger than a padded message

    def loop(size: int) -> None:
        gather(torch.ones(()), watched)
        gather((logits, torch.ones(64)), watched)
        gather(logits, watched)
        gather(torch.ones(8, size), watched)  # e.g. texts of varying lengths
        reduce(torch.ones(()), "mean", comm=watched)
        reduce({"a": ONE, "n": torch.tensor(3)}, comm=watched)
        reduce(torch.ones(300_000), comm=watched)
        pad_across_processes(torch.ones(2, size), 1, comm=watched)
        broadcast(torch.ones(size), comm=watched)

    for size in (1, 400, 7, 900, 32):
        calls.clear()
        loop(size)
    assert calls == ["gather"] * 4 + ["reduce"] * 4 + ["gather", "reduce"]


@case
def large_messages_of_varying_sizes_follow_a_small_one(comm: Communicator) -> None:
    watched, calls = counted(comm)
    for size in (2**19, 1, 2**19 + 3, 2**18, 2**20):
        calls.clear()
        same(gather(torch.ones(size), watched), torch.ones(size * comm.size))
        pair = gather([torch.ones(size), ONE], watched)
        same(pair[0], torch.ones(size * comm.size))
        same(reduce(torch.ones(size), comm=watched), torch.full((size,), float(comm.size)))
        sent = torch.full((size,), float(comm.rank))
        same(broadcast(sent, 1, comm=watched), torch.ones(size))
        assert len(calls) <= 8


@case
def digests_of_the_calls_are_equal_on_all_ranks(comm: Communicator) -> None:
    watched, _ = counted(comm)
    assert watched.structure_digest == 0
    gather({"a": ONE}, watched)
    first = watched.structure_digest
    gather({"b": ONE}, watched)
    assert len({0, first, watched.structure_digest}) == 3
    assert comm.gather_object(watched.structure_digest) == [watched.structure_digest] * comm.size


@case
def long_reports_show_what_differs(comm: Communicator) -> None:
    tree = {f"layer{i}": ONE for i in range(20)}
    tree["layer7"] = torch.ones(1 + comm.rank)
    refused("gather", lambda: gather(tree, comm), "['layer7'] [2] float32, and 19 equal ones")


# --- debug ----------------------------------------------------------------------------------------


@case
def debug_mode_names_the_collective_and_every_shape(comm: Communicator) -> None:
    watched, _ = counted(comm, debug=True)
    uneven = {"x": torch.zeros(2, comm.rank + 1), "y": [torch.tensor(True)]}
    lines = [f"process {r}: ['x'] [2, {r + 1}] float32, ['y'][0] [] bool" for r in (0, 1)]
    for verb, call in VERBS.items():
        if verb != "pad_across_processes":
            refused(verb, lambda: call(uneven, watched), *lines)  # noqa: B023
    mixed: list[Any] = [torch.ones(1, dtype=torch.float32 if comm.rank else torch.float64)]
    for tree in (mixed, [torch.ones(1)] * (comm.rank + 1), torch.ones(1) if comm.rank else "x"):
        with pytest.raises(DistributedOperationException):
            gather(tree, watched)


@case
def debug_mode_accepts_matching_shapes(comm: Communicator) -> None:
    watched, calls = counted(comm, debug=True)
    same(gather(torch.ones(1), watched), torch.ones(comm.size))
    assert calls == ["reduce", "gather"]
    assert len(pad_across_processes(torch.ones(comm.rank + 1), comm=watched)) == comm.size
    total = comm.size * (comm.size + 1) // 2
    assert len(gather_uneven(torch.ones(comm.rank + 1, 2), watched)) == total
    with pytest.raises(TypeError, match="gather_object"):
        gather("text", watched)


def main(rank: int, size: int, store: str, report: str) -> None:
    torch.set_num_threads(1)
    # Fail if the collectives use names that torch has deprecated.
    warnings.filterwarnings("error", message=".*deprecated.*", category=FutureWarning)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=30),
    )
    comm = Communicator(
        rank=rank, size=size, device=torch.device("cpu"), hooks=bind_collectives(TorchCollectives())
    )
    results = {}
    for name, function in CASES.items():
        try:
            function(comm)
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
        Path(f"{report}.{rank}").write_text(json.dumps(results))
        if results[name]:
            break  # the ranks may now be in different collectives
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
