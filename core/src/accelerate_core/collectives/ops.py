"""The verbs on nested structures, gather, reduce, broadcast and so on, and those on objects.

Gathering moves bytes: whatever a structure holds goes in one collective. Reductions take one
collective per dtype on the wire. On one process nothing is sent and nothing copied, save that
`reduce` returns a tensor of its own.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args

import torch

from accelerate_core.collectives.communicator import Communicator, ReduceOp
from accelerate_core.collectives.packing import Layout, layout_of, pack, unpack, unpack_rows
from accelerate_core.collectives.verify import verify
from accelerate_core.errors import (
    ConfigurationError,
    DistributedOperationException,
    did_you_mean,
    listing,
)
from accelerate_core.nested import (
    TensorInformation,
    get_data_structure,
    initialize_tensors,
    iterate_leaves,
    leaves_of,
    map_leaves,
    recursively_apply,
)

__all__ = [
    "CannotPadNestedTensorWarning",
    "broadcast",
    "broadcast_object_list",
    "copy_tensor_to_devices",
    "gather",
    "gather_object",
    "gather_uneven",
    "pad_across_processes",
    "reduce",
    "scatter",
]

T = TypeVar("T")


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor (`torch.nested`) was passed to `pad_across_processes` and is not padded."""


def gather(tree: Any, comm: Communicator) -> Any:
    """Join the tensors of all processes on dimension 0, in rank order.

    A leaf [d0, ...] becomes [size * d0, ...], a 0-d leaf [size]; dtypes stay; results are
    detached and on the device of the communicator. Shapes have to be equal on all ranks, see
    `gather_uneven` and `pad_across_processes`. One collective for the whole tree. One process
    gets its input back. Raises `TypeError` for a leaf that is not a dense tensor.

        predictions, labels = gather((predictions, labels), comm)
    """
    if comm.size == 1:
        return tree
    verify("gather", tree, comm)
    tensors = _tensors("gather", tree)
    if not tensors:
        return tree
    return _refill(tree, _gather_packed(tensors, layout_of(tensors), comm))


def _gather_packed(
    tensors: list[torch.Tensor], layout: Layout, comm: Communicator
) -> list[torch.Tensor]:
    return unpack_rows(comm.gather(pack(tensors, layout, comm.device)), layout, comm.size)


def gather_uneven(tree: Any, comm: Communicator) -> Any:
    """Like `gather`, for tensors whose dimension 0 may differ between the ranks.

    A leaf becomes [sum of d0 over the ranks, ...]. Two collectives for the whole tree: the
    lengths, then the bytes, each rank's padded to the longest.
    """
    if comm.size == 1:
        return tree
    verify("gather_uneven", tree, comm, free_dim=(0,))
    tensors = _tensors("gather_uneven", tree)
    if not tensors:
        return tree
    lengths = _gather_integers([len(leaf) if leaf.ndim else 1 for leaf in tensors], comm)
    mine = layout_of(tensors)
    if all(row == lengths[0] for row in lengths):
        return _refill(tree, _gather_packed(tensors, mine, comm))

    layouts = [
        layout_of(_with_length(leaf, count) for leaf, count in zip(tensors, row, strict=True))
        for row in lengths
    ]
    longest = max(layout.total for layout in layouts)
    buffer = torch.empty(longest, dtype=torch.uint8, device=comm.device)
    buffer[: mine.total] = pack(tensors, mine, comm.device)
    rows = comm.gather(buffer).view(comm.size, longest)
    parts = [unpack(rows[rank], layout) for rank, layout in enumerate(layouts)]
    return _refill(tree, [torch.cat(pieces) for pieces in zip(*parts, strict=True)])


def _with_length(leaf: torch.Tensor, length: int) -> TensorInformation:
    return TensorInformation(torch.Size([length, *leaf.shape[1:]]), leaf.dtype)


def _gather_integers(values: list[int], comm: Communicator) -> list[list[int]]:
    """Return the values of every rank, one row per rank."""
    own = torch.tensor(values, dtype=torch.int64, device=comm.device)
    rows: list[list[int]] = comm.gather(own).view(comm.size, len(values)).tolist()
    return rows


# What a dtype travels as where sums are concerned: groups differ in what they can add, and all
# of them can add these.
_ON_THE_WIRE = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.bool: torch.uint8,
}


def reduce(tree: Any, reduction: str = "sum", scale: float = 1.0, *, comm: Communicator) -> Any:
    """Combine the tensors of all processes elementwise; every process gets the result.

    `reduction` is "sum", "mean", "max", "min", or "none", which returns the tree untouched. The
    result is multiplied by `scale`. Dtypes stay, but for the mean of integers and bools, which is
    float32; the sum of bools is their "or". One collective per dtype. Among several processes
    results are detached and on the communicator's device; one process gets copies. Raises
    `TypeError` for a leaf that is not a dense tensor, `ConfigurationError` (a `ValueError`) for
    another reduction.

        loss = reduce(loss, "mean", comm=comm)
    """
    op = _checked_reduction(reduction)
    if op is None:
        return tree
    verify("reduce", tree, comm)
    tensors = _tensors("reduce", tree)
    reduced = _reduce_all(tensors, op, comm) if comm.size > 1 else _reduce_alone(tensors, op)
    return _refill(tree, [leaf * scale for leaf in reduced] if scale != 1.0 else reduced)


def _checked_reduction(reduction: str) -> ReduceOp | None:
    for op in get_args(ReduceOp):
        if op == reduction:
            return op  # type: ignore[no-any-return]
    if reduction == "none":
        return None
    allowed = (*get_args(ReduceOp), "none")
    raise ConfigurationError(
        f"reduce() got reduction={reduction!r}; allowed are {listing(allowed)}."
        + did_you_mean(str(reduction), allowed)
    )


def _reduce_alone(tensors: list[torch.Tensor], op: ReduceOp) -> list[torch.Tensor]:
    # Copies, as every process of a larger run gets one: a tensor zeroed after it was reduced must
    # not take the result with it.
    return [
        leaf.clone() if op != "mean" or _is_inexact(leaf) else leaf.to(torch.float32)
        for leaf in tensors
    ]


def _reduce_all(
    tensors: list[torch.Tensor], op: ReduceOp, comm: Communicator
) -> list[torch.Tensor]:
    groups: dict[tuple[torch.dtype, ReduceOp], list[int]] = defaultdict(list)
    flat = []
    for index, leaf in enumerate(tensors):
        values, wire_op = _to_wire(leaf.detach().to(comm.device), op)
        flat.append(values)
        groups[values.dtype, wire_op].append(index)

    reduced: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
    for (_, wire_op), members in groups.items():
        joined = torch.cat([flat[index] for index in members])
        total = comm.reduce(joined, wire_op, overwrite=True)
        pieces = torch.split(total, [flat[index].numel() for index in members])
        for index, piece in zip(members, pieces, strict=True):
            # Their own memory: results that share one are refused by some file formats.
            own = piece.clone() if len(members) > 1 else piece
            reduced[index] = _from_wire(own, tensors[index], op)
    return reduced


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _to_wire(leaf: torch.Tensor, op: ReduceOp) -> tuple[torch.Tensor, ReduceOp]:
    """Return the leaf flat in a dtype that groups can reduce, and the operation to ask for."""
    flat = leaf.reshape(-1)
    if leaf.is_complex():
        if op in ("max", "min"):
            raise TypeError(f"reduce() cannot take the {op} of complex numbers.")
        return torch.view_as_real(flat.resolve_conj()).reshape(-1), op
    if leaf.is_floating_point():
        return (flat if leaf.dtype.itemsize > 1 else flat.to(torch.float32)), op
    if op == "mean":
        return flat.to(torch.int64), op
    if leaf.dtype == torch.bool and op == "sum":
        return flat.to(torch.uint8), "max"
    return flat.to(_ON_THE_WIRE.get(leaf.dtype, leaf.dtype)), op


def _from_wire(values: torch.Tensor, leaf: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    if leaf.is_complex():
        return torch.view_as_complex(values.view(-1, 2)).view(leaf.shape)
    if op == "mean" and not leaf.is_floating_point():
        return values.view(leaf.shape)
    return values.to(leaf.dtype).view(leaf.shape)


def broadcast(tree: Any, from_process: int = 0, *, comm: Communicator) -> Any:
    """Give every process the tensors of process `from_process`.

    The other processes pass a tree of the same structure, shapes and dtypes; its tensors are
    overwritten and returned where they are on the communicator's device and can be written, else
    new ones take their place. One collective for the whole tree. Raises `TypeError` for a leaf
    that is not a dense tensor.
    """
    if comm.size == 1:
        return tree
    _check_rank("broadcast", from_process, comm)
    verify("broadcast", tree, comm)
    tensors = _tensors("broadcast", tree)
    if not tensors:
        return tree
    layout = layout_of(tensors)
    received = unpack(comm.broadcast(pack(tensors, layout, comm.device), from_process), layout)
    if comm.rank == from_process:
        return _refill(tree, [leaf.to(comm.device) for leaf in tensors])
    pairs = zip(tensors, received, strict=True)
    return _refill(tree, [_write_into(leaf, value) for leaf, value in pairs])


def _write_into(leaf: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    overlaps = any(step == 0 and n > 1 for step, n in zip(leaf.stride(), leaf.shape, strict=True))
    locked = leaf.is_inference() and not torch.is_inference_mode_enabled()
    if overlaps or locked or leaf.device != value.device:
        return value.clone()
    if leaf.data_ptr() != value.data_ptr():
        with torch.no_grad():
            leaf.copy_(value)
    return leaf


def scatter(tree: Any, from_process: int = 0, *, comm: Communicator, like: Any = None) -> Any:
    """Split the tensors that process `from_process` holds evenly on dimension 0, a part for each.

    A leaf [d0, ...] becomes [d0 / size, ...]; 0-d leaves and leaves that are no tensors go to
    everyone. The other processes pass None. The structure of a part is sent first, unless every
    process passes it as `like`, a tree of tensors or of `TensorInformation`; then the bytes go in
    one collective. Raises `DistributedOperationException` on every process if `d0` does not
    divide (with `like`: on `from_process`, before anything is sent).
    """
    if comm.size == 1:
        return tree
    _check_rank("scatter", from_process, comm)
    is_source = comm.rank == from_process
    problem = _unequal_split(tree, comm.size) if is_source else None
    if like is None:
        plan = _part_of(tree, comm.size) if is_source and problem is None else None
        problem, like = comm.broadcast_object((problem, plan), from_process)
    if problem is not None:
        raise DistributedOperationException(problem)

    structure = get_data_structure(like)
    infos = [leaf for _, leaf in iterate_leaves(structure) if isinstance(leaf, TensorInformation)]
    if not infos:
        return like
    layout = layout_of(infos)
    empty = torch.empty(layout.total, dtype=torch.uint8, device=comm.device)
    parts = _cut(tree, layout, comm) if is_source else None
    values = iter(unpack(comm.scatter(parts, empty, from_process), layout))
    return map_leaves(
        lambda leaf: next(values).clone() if isinstance(leaf, TensorInformation) else leaf,
        structure,
    )


def _unequal_split(tree: Any, size: int) -> str | None:
    for path, leaf in iterate_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.ndim and len(leaf) % size:
            at = f" at {path}" if path else ""
            return (
                f"scatter: the tensor{at} has {len(leaf)} entries on dimension 0, which do not "
                f"divide among {size} processes. Pad it, see pad_input_tensors."
            )
    return None


def _part_of(tree: Any, size: int) -> Any:
    """Return the tree with a `TensorInformation` of one process' part for every tensor."""

    def part(leaf: torch.Tensor) -> TensorInformation:
        shape = [len(leaf) // size, *leaf.shape[1:]] if leaf.ndim else []
        return TensorInformation(torch.Size(shape), leaf.dtype)

    return recursively_apply(part, tree)


def _cut(tree: Any, layout: Layout, comm: Communicator) -> list[torch.Tensor]:
    tensors = [leaf for _, leaf in iterate_leaves(tree) if isinstance(leaf, torch.Tensor)]
    pieces = [
        leaf.tensor_split(comm.size) if leaf.ndim else (leaf,) * comm.size for leaf in tensors
    ]
    return [pack(row, layout, comm.device) for row in zip(*pieces, strict=True)]


def pad_across_processes(
    tree: Any,
    dim: int | Sequence[int] = 0,
    pad_index: float = 0,
    pad_first: bool = False,
    *,
    comm: Communicator,
) -> Any:
    """Lengthen every tensor along `dim` to the longest of all processes, ready to be gathered.

    `dim` may name several dimensions. New entries are `pad_index`, after the old ones or, with
    `pad_first`, before them. Tensors without such a dimension are kept, as are nested tensors,
    with a warning. One collective of a few integers for the whole tree. Raises `TypeError` for a
    leaf that is no tensor.

        ids = pad_across_processes(ids, dim=1, pad_index=tokenizer.pad_token_id, comm=comm)
    """
    if comm.size == 1:
        return tree
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    verify("pad_across_processes", tree, comm, free_dim=dims)
    leaves = _tensors("pad_across_processes", tree, dense=False)
    if any(leaf.is_nested for leaf in leaves):
        warnings.warn(
            "A nested tensor cannot be padded across processes and stays as it is. Convert it "
            "with to_padded_tensor first.",
            CannotPadNestedTensorWarning,
            stacklevel=2,
        )
    concerned = [[each for each in dims if _has_dim(leaf, each)] for leaf in leaves]
    own = [leaf.shape[at] for leaf, its in zip(leaves, concerned, strict=True) for at in its]
    if not own:
        return tree
    longest = (max(column) for column in zip(*_gather_integers(own, comm), strict=True))
    padded = []
    for leaf, its in zip(leaves, concerned, strict=True):
        for at in its:
            leaf = _pad(leaf, at, next(longest), pad_index, pad_first)
        padded.append(leaf)
    return _refill(tree, padded)


def _has_dim(leaf: torch.Tensor, dim: int) -> bool:
    return not leaf.is_nested and -leaf.ndim <= dim < leaf.ndim


def _pad(
    leaf: torch.Tensor, dim: int, length: int, pad_index: float, pad_first: bool
) -> torch.Tensor:
    missing = length - leaf.shape[dim]
    if missing == 0:
        return leaf
    shape = list(leaf.shape)
    shape[dim] = missing
    filling = leaf.new_full(shape, pad_index)
    return torch.cat([filling, leaf] if pad_first else [leaf, filling], dim=dim)


def gather_object(obj: Any, comm: Communicator) -> Any:
    """Join the picklable objects of all processes in one list, in rank order.

    Each process passes a list (any iterable but a string or a mapping), and the lists are
    concatenated; of anything else the result has one per process. One process gets its input
    back.

        names = gather_object([f"sample {comm.rank}"], comm)
    """
    if comm.size == 1:
        return obj
    if isinstance(obj, Iterator):
        obj = list(obj)
    gathered = comm.gather_object(obj)
    return [item for each in gathered for item in (each if _is_series(each) else [each])]


def _is_series(obj: Any) -> bool:
    # A 0-d array is iterable by its class and refuses when asked.
    is_scalar = isinstance(obj, (str, bytes, Mapping)) or getattr(obj, "ndim", 1) == 0
    return isinstance(obj, Iterable) and not is_scalar


def broadcast_object_list(
    object_list: list[T], from_process: int = 0, *, comm: Communicator
) -> list[T]:
    """Replace the picklable objects of a list, in place, by those of process `from_process`.

    Returns the same list. Lengths have to be equal, or `DistributedOperationException` is raised
    where they are not.
    """
    if comm.size == 1:
        return object_list
    _check_rank("broadcast_object_list", from_process, comm)
    received = comm.broadcast_object(object_list, from_process)
    if len(received) != len(object_list):
        raise DistributedOperationException(
            f"broadcast_object_list: process {from_process} sent {len(received)} objects, "
            f"process {comm.rank} has a list of {len(object_list)}."
        )
    if comm.rank != from_process:
        object_list[:] = received
    return object_list


def copy_tensor_to_devices(
    tensor: torch.Tensor | None = None, *, comm: Communicator
) -> torch.Tensor:
    """Give every process the tensor that one of them has; the others pass None.

    Unlike `broadcast`, the others need to know neither its shape nor who has it. Raises
    `DistributedOperationException` on every process unless exactly one passes a tensor.
    """
    mine = None if tensor is None else TensorInformation(tensor.shape, tensor.dtype)
    infos = comm.gather_object(mine)
    holders = [rank for rank, info in enumerate(infos) if info is not None]
    if len(holders) != 1:
        given = f"processes {', '.join(map(str, holders))} did" if holders else "none did"
        raise DistributedOperationException(
            f"copy_tensor_to_devices: exactly one process has to pass a tensor, but {given}."
        )
    if tensor is None:
        tensor = initialize_tensors(infos[holders[0]], comm.device)
    result: torch.Tensor = broadcast(tensor, holders[0], comm=comm)
    return result


def _tensors(verb: str, tree: Any, *, dense: bool = True) -> list[torch.Tensor]:
    """Return the leaves of a tree, all of which have to be tensors."""
    leaves = leaves_of(tree)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or (dense and not _is_dense(leaf)):
            _refuse(verb, tree, dense)
    return leaves


def _is_dense(leaf: torch.Tensor) -> bool:
    return leaf.layout is torch.strided and not leaf.is_nested


def _refuse(verb: str, tree: Any, dense: bool) -> None:
    for path, leaf in iterate_leaves(tree):
        at = f" at {path}" if path else ""
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(
                f"{verb} takes tensors in nested lists, tuples, mappings and dataclasses, not "
                f"a {type(leaf).__name__}{at}. For other objects use gather_object or "
                f"broadcast_object_list."
            )
        if dense and not _is_dense(leaf):
            raise TypeError(
                f"{verb} takes dense tensors, and the one{at} is not (layout {leaf.layout}). "
                "Convert it with to_dense or to_padded_tensor first."
            )


def _refill(tree: Any, tensors: list[torch.Tensor]) -> Any:
    values = iter(tensors)
    return map_leaves(lambda _: next(values), tree)


def _check_rank(verb: str, rank: int, comm: Communicator) -> None:
    if not 0 <= rank < comm.size:
        raise ConfigurationError(
            f"{verb}: from_process={rank} is not a process; there are {comm.size}, counted from 0."
        )
