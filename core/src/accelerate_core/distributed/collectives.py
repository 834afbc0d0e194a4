"""Collectives on nested structures of tensors (gather, reduce, broadcast, ...) and on objects.

Gathering sends bytes, so one collective is enough for a whole structure. Reductions need one collective
per dtype. On one process nothing is sent or copied, except that `reduce` returns a copy.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast, get_args

import torch

from accelerate_core.distributed.communicator import Communicator
from accelerate_core.distributed.packing import layout_of, pack, unpack, unpack_rows
from accelerate_core.distributed.torch_collectives import ReduceOp
from accelerate_core.distributed.tree import TensorInformation, flatten, iterate_leaves, unflatten
from accelerate_core.errors import (
    ConfigurationError,
    DistributedOperationException,
    did_you_mean,
    listing,
    warn,
)


class CannotPadNestedTensorWarning(UserWarning):
    """`pad_across_processes` received a nested tensor (`torch.nested`) and did not pad it."""


def gather(tree: Any, comm: Communicator) -> Any:
    """Concatenate the tensors of all processes along dimension 0, in rank order.

    A leaf of shape [d0, ...] becomes [size * d0, ...], and a 0-d leaf becomes [size]. Dtypes don't change.
    Results are detached and on the communicator's device. Shapes must be equal on all ranks; otherwise use
    `gather_uneven` or `pad_across_processes`. The whole tree takes one collective. A single process
    gets its input back. Raises `TypeError` for a leaf that is not a dense tensor.

    Example:
        comm = accelerator.communicator
        guesses, labels = gather((model(x).argmax(1), y), comm)
    """
    if comm.size == 1:
        if not isinstance(tree, torch.Tensor):
            _check_alone(tree)
        return tree
    verify("gather", tree, comm)
    tensors = _tensors("gather", tree)
    if not tensors:
        return tree
    return unflatten(tree, _gather_equal(tensors, comm))


def _check_alone(tree: Any) -> None:
    """Warn if the tree has a leaf that several processes could not gather."""
    try:
        _tensors("gather", tree)
    except TypeError as error:
        warn(f"{error} One process returns it unchanged, but several raise this error.")


def _gather_equal(tensors: list[torch.Tensor], comm: Communicator) -> list[torch.Tensor]:
    layout = layout_of(tensors)
    return unpack_rows(comm.gather(pack(tensors, layout, comm.device)), layout, comm.size)


def gather_uneven(tree: Any, comm: Communicator) -> Any:
    """Like `gather`, for tensors whose dimension 0 may differ between the ranks.

    A leaf becomes [sum of d0 over the ranks, ...]. The whole tree takes two collectives: one for the
    lengths, and one for the bytes, which are padded to the longest rank.

    Args:
        comm: the ranks that take part.
    """
    if comm.size == 1:
        return tree
    verify("gather_uneven", tree, comm, free_dim=(0,))
    tensors = _tensors("gather_uneven", tree)
    if not tensors:
        return tree
    own = [len(leaf) if leaf.ndim else 1 for leaf in tensors]
    lengths = _gather_sizes("gather_uneven", tree, own, comm, free_dim=(0,))
    if all(row == lengths[0] for row in lengths):
        return unflatten(tree, _gather_equal(tensors, comm))

    layouts = [
        layout_of(
            TensorInformation(torch.Size([count, *leaf.shape[1:]]), leaf.dtype)
            for leaf, count in zip(tensors, row, strict=True)
        )
        for row in lengths
    ]
    longest = max(layout.total for layout in layouts)
    buffer = torch.empty(longest, dtype=torch.uint8, device=comm.device)
    mine = layouts[comm.rank]
    buffer[: mine.total] = pack(tensors, mine, comm.device)
    rows = comm.gather(buffer).view(comm.size, longest)
    parts = [unpack(rows[rank], layout) for rank, layout in enumerate(layouts)]
    return unflatten(tree, [torch.cat(pieces) for pieces in zip(*parts, strict=True)])


def _gather_sizes(
    verb: str, tree: Any, sizes: list[int], comm: Communicator, free_dim: Sequence[int]
) -> list[list[int]]:
    """Return the sizes of every rank, one row per rank.

    The same collective carries a checksum of everything that must be equal, so this check is free.

    Raises:
        DistributedOperationException: something other than the sizes differs. Raised on every rank.
    """
    rows = [_row(path, leaf, free_dim) for path, leaf in iterate_leaves(tree)]
    fixed = repr([has_to_be_equal for _, has_to_be_equal in rows])
    own = torch.tensor([*sizes, zlib.crc32(fixed.encode())], device=comm.device)
    table: list[list[int]] = comm.gather(own).view(comm.size, len(own)).tolist()
    if any(row[-1] != table[0][-1] for row in table):
        _refuse(verb, rows, comm)
    return [row[:-1] for row in table]


_REDUCTIONS = (*get_args(ReduceOp), "none")

# The dtype in which each dtype is reduced. Process groups differ in the dtypes that they can add, but
# all of them can add these.
_ENCODED_AS = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.bool: torch.uint8,
}


def reduce(tree: Any, reduction: str = "sum", scale: float = 1.0, *, comm: Communicator) -> Any:
    """Combine the tensors of all processes elementwise. Every process gets the result.

    `reduction` is "sum", "mean", "max", "min", or "none", which returns the tree unchanged. The
    result is multiplied by `scale`. Dtypes don't change, except that the mean of integers and bools is
    float32. The sum of bools is their logical or. Each dtype takes one collective. With several processes,
    results are detached and on the communicator's device; a single process gets copies. Raises
    `TypeError` for a leaf that is not a dense tensor.

    Raises:
        ConfigurationError: `reduction` is unknown. This is also a `ValueError`.

    Example:
        loss = reduce(loss, "mean", comm=accelerator.communicator)
    """
    if reduction not in _REDUCTIONS:
        raise ConfigurationError(
            f"reduce() received reduction={reduction!r}; allowed values are {listing(_REDUCTIONS)}."
            + did_you_mean(str(reduction), _REDUCTIONS)
        )
    if reduction == "none":
        return tree
    op = cast(ReduceOp, reduction)
    verify("reduce", tree, comm)
    tensors = _tensors("reduce", tree)
    reduced = _reduce_all(tensors, op, comm) if comm.size > 1 else _reduce_alone(tensors, op)
    return unflatten(tree, [leaf * scale for leaf in reduced] if scale != 1.0 else reduced)


def _reduce_alone(tensors: list[torch.Tensor], op: ReduceOp) -> list[torch.Tensor]:
    # Return copies, as with several processes: zeroing the input afterwards must not change the
    # result.
    return [
        leaf.clone()
        if op != "mean" or leaf.is_floating_point() or leaf.is_complex()
        else leaf.float()
        for leaf in tensors
    ]


def _reduce_all(
    tensors: list[torch.Tensor], op: ReduceOp, comm: Communicator
) -> list[torch.Tensor]:
    groups: dict[tuple[torch.dtype, ReduceOp], list[int]] = defaultdict(list)
    flat = []
    for index, leaf in enumerate(tensors):
        values, group_op = _encoded(leaf.detach().to(comm.device), op)
        flat.append(values)
        groups[values.dtype, group_op].append(index)

    reduced: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
    for (_, group_op), members in groups.items():
        joined = torch.cat([flat[index] for index in members])
        total = comm.reduce(joined, group_op, overwrite=True)
        pieces = torch.split(total, [flat[index].numel() for index in members])
        for index, piece in zip(members, pieces, strict=True):
            # Don't share memory between results, because some file formats refuse it.
            own = piece.clone() if len(members) > 1 else piece
            reduced[index] = _decoded(own, tensors[index], op)
    return reduced


def _encoded(leaf: torch.Tensor, op: ReduceOp) -> tuple[torch.Tensor, ReduceOp]:
    """Return the flattened leaf in a dtype that groups can reduce, and the operation to use."""
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
    return flat.to(_ENCODED_AS.get(leaf.dtype, leaf.dtype)), op


def _decoded(values: torch.Tensor, leaf: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    if leaf.is_complex():
        return torch.view_as_complex(values.view(-1, 2)).view(leaf.shape)
    if op == "mean" and not leaf.is_floating_point():
        return values.view(leaf.shape)
    return values.to(leaf.dtype).view(leaf.shape)


def broadcast(tree: Any, from_process: int = 0, *, comm: Communicator) -> Any:
    """Return the tensors of process `from_process` on every process.

    The other processes pass a tree with the same structure, shapes and dtypes. Tensors that are writable
    and on the communicator's device are overwritten and returned; others are replaced by new tensors. The
    whole tree takes one collective. Raises `TypeError` for a leaf that is not a dense tensor.

    Raises:
        ConfigurationError: `from_process` is not the index of a process.
    """
    if comm.size == 1:
        return tree
    if not 0 <= from_process < comm.size:
        raise ConfigurationError(
            f"broadcast() received from_process={from_process}; with {comm.size} processes, it must "
            f"be from 0 to {comm.size - 1}."
        )
    verify("broadcast", tree, comm)
    tensors = _tensors("broadcast", tree)
    if not tensors:
        return tree
    layout = layout_of(tensors)
    received = unpack(comm.broadcast(pack(tensors, layout, comm.device), from_process), layout)
    if comm.rank == from_process:
        return unflatten(tree, [leaf.to(comm.device) for leaf in tensors])
    pairs = zip(tensors, received, strict=True)
    return unflatten(tree, [_write_into(leaf, value) for leaf, value in pairs])


def _write_into(leaf: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    overlaps = any(step == 0 and n > 1 for step, n in zip(leaf.stride(), leaf.shape, strict=True))
    locked = leaf.is_inference() and not torch.is_inference_mode_enabled()
    if overlaps or locked or leaf.device != value.device:
        return value.clone()
    if leaf.data_ptr() != value.data_ptr():
        with torch.no_grad():
            leaf.copy_(value)
    return leaf


def pad_across_processes(
    tree: Any,
    dim: int | Sequence[int] = 0,
    pad_index: float = 0,
    pad_first: bool = False,
    *,
    comm: Communicator,
) -> Any:
    """Pad every tensor along `dim` to the largest size on any process, so that it can be gathered.

    `dim` may be several dimensions. New entries have the value `pad_index` and come after the old ones, or
    before them with `pad_first`. Tensors without such a dimension are returned unchanged, and so are nested
    tensors, with a warning. The whole tree takes one collective of a few integers. Raises `TypeError`
    for a leaf that is not a tensor.

    Example:
        ids = torch.tensor([[5, 7, 2]])  # as long as this rank's longest text
        ids = pad_across_processes(ids, dim=1, pad_index=0, comm=accelerator.communicator)
    """
    if comm.size == 1:
        return tree
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    verify("pad_across_processes", tree, comm, free_dim=dims)
    leaves = _tensors("pad_across_processes", tree, dense=False)
    if any(leaf.is_nested for leaf in leaves):
        warn(
            "A nested tensor cannot be padded across processes, so it is unchanged. Convert it "
            "with to_padded_tensor first.",
            CannotPadNestedTensorWarning,
        )
    concerned = [[each for each in dims if _has_dim(leaf, each)] for leaf in leaves]
    own = [leaf.shape[at] for leaf, its in zip(leaves, concerned, strict=True) for at in its]
    if not own:
        return tree
    rows = _gather_sizes("pad_across_processes", tree, own, comm, free_dim=dims)
    longest = (max(column) for column in zip(*rows, strict=True))
    padded = []
    for leaf, its in zip(leaves, concerned, strict=True):
        for at in its:
            leaf = _pad(leaf, at, next(longest), pad_index, pad_first)
        padded.append(leaf)
    return unflatten(tree, padded)


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
    """Collect the picklable objects of all processes in one list, in rank order.

    If a process passes a list (or any iterable except a string or a mapping), its items are added to the
    result; any other object is added as one item. A single process gets its input back.

    Example:
        comm = accelerator.communicator
        names = gather_object([f"sample {comm.rank}"], comm)
    """
    if comm.size == 1:
        return obj
    if isinstance(obj, Iterator):
        obj = list(obj)
    gathered = comm.gather_object(obj)
    return [item for each in gathered for item in (each if _is_series(each) else [each])]


def _is_series(obj: Any) -> bool:
    # The class of a 0-d array is iterable, but iterating over it fails.
    is_scalar = isinstance(obj, (str, bytes, Mapping)) or getattr(obj, "ndim", 1) == 0
    return isinstance(obj, Iterable) and not is_scalar


def _tensors(verb: str, tree: Any, *, dense: bool = True) -> list[torch.Tensor]:
    """Return the leaves of a tree, which must all be tensors."""
    leaves = flatten(tree)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(
                f"{verb} takes tensors in nested lists, tuples, mappings and dataclasses, not "
                f"a {type(leaf).__name__}{_at(tree, index)}. For other objects use gather_object "
                f"or broadcast_object_list."
            )
        if dense and (leaf.layout is not torch.strided or leaf.is_nested):
            raise TypeError(
                f"{verb} takes dense tensors, but the tensor{_at(tree, index)} is not dense (layout "
                f"{leaf.layout}). Convert it with to_dense or to_padded_tensor first."
            )
    return leaves


def _at(tree: Any, index: int) -> str:
    path, _ = list(iterate_leaves(tree))[index]
    return f" at {path}" if path else ""


# --- the check of shapes ----------------------------------------------------------------------

_ADVICE = {
    "gather": "Pad the tensors to one shape with pad_across_processes, or use gather_object.",
    "gather_uneven": "Only dimension 0 may differ between the processes.",
    "pad_across_processes": "Only the padded dimension may differ between the processes.",
}
_DEFAULT_ADVICE = "Structures, shapes and dtypes must be equal on all processes."


def _row(path: str, leaf: Any, free_dim: Sequence[int]) -> tuple[str, tuple[Any, ...]]:
    """Return a description of a leaf, and the properties that must be equal on all ranks."""
    if not isinstance(leaf, torch.Tensor):
        kind = type(leaf).__name__
        return f"{path} <{kind}>", (path, kind)
    dtype = str(leaf.dtype).removeprefix("torch.")
    free = {dim % leaf.ndim for dim in free_dim if -leaf.ndim <= dim < leaf.ndim}
    fixed = [-1 if dim in free else length for dim, length in enumerate(leaf.shape)]
    return f"{path} {list(leaf.shape)} {dtype}", (path, fixed, dtype)


def verify(verb: str, tree: Any, comm: Communicator, free_dim: Sequence[int] = ()) -> None:
    """Raise `DistributedOperationException` on every rank if the trees don't match.

    With unequal sizes, a process group may hang or abort the process without a Python error. So digests of
    the trees are compared first: at the first call of each verb, which finds most mistakes, and at every
    call if `comm.debug` is set.

    Args:
        free_dim: the dimensions whose lengths may differ.
    """
    if comm.size == 1 or (verb in comm.verified and not comm.debug):
        return
    rows = [_row(path, leaf, free_dim) for path, leaf in iterate_leaves(tree)]
    if not comm.all_equal([fixed for _, fixed in rows]):
        _refuse(verb, rows, comm)
    comm.verified.add(verb)


def _refuse(verb: str, rows: list[tuple[str, tuple[Any, ...]]], comm: Communicator) -> NoReturn:
    reports = comm.gather_object(rows)
    lines = "\n".join(
        f"  - process {rank}: {', '.join(text.strip() for text, _ in report) or 'no tensor'}"
        for rank, report in enumerate(reports)
    )
    raise DistributedOperationException(
        f"{verb}: the processes passed tensors that do not match.\n{lines}\n"
        f"{_ADVICE.get(verb, _DEFAULT_ADVICE)}"
    )
