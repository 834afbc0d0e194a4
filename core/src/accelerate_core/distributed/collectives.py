"""Collectives on nested structures of tensors (gather, reduce, broadcast, ...) and on objects.

Gathering sends bytes, so one collective is enough for a whole structure. Reductions need one collective
per dtype. A digest of the structure travels with the tensors (`checked_messages`): if structures differ, all
ranks raise `DistributedOperationException`. On one process nothing is sent or copied, except that `reduce`
returns a copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast, get_args

import torch

from accelerate_core.distributed import checked_messages as messages
from accelerate_core.distributed.checked_messages import Call
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.distributed.message_history import Form
from accelerate_core.distributed.packing import aligned, layout_of, pack, unpack, unpack_rows
from accelerate_core.distributed.structure import Rule, read, restore, rows
from accelerate_core.distributed.torch_collectives import ReduceOp
from accelerate_core.distributed.tree import TensorInformation
from accelerate_core.errors import ConfigurationError, did_you_mean, listing, warn


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
            _warn_about_leaves(tree)
        return tree
    leaves, key = read(tree)
    call = Call(comm, "gather", key)
    problem = _problem("gather", leaves, key)
    if problem is not None:
        messages.gather(call, [])
        raise problem
    return restore(tree, unpack_rows(*messages.gather(call, leaves)))


def _warn_about_leaves(tree: Any) -> None:
    """Warn if the tree has a leaf that several processes could not gather."""
    problem = _problem("gather", *read(tree))
    if problem is not None:
        warn(f"{problem} One process returns it unchanged, but several raise this error.")


def gather_uneven(tree: Any, comm: Communicator) -> Any:
    """Like `gather`, for tensors whose dimension 0 may differ between the ranks.

    A leaf becomes [sum of d0 over the ranks, ...]. The whole tree takes two collectives: one for the
    lengths, and one for the bytes, which are padded to the longest rank.

    Args:
        comm: the ranks that take part.
    """
    if comm.size == 1:
        return tree
    leaves, key = read(tree)
    call = Call(comm, "gather_uneven", key, Rule(free_dims=(0,)))
    problem = _problem("gather_uneven", leaves, key)
    if problem is not None:
        messages.gather(call, [])
        raise problem
    if not leaves:
        messages.gather(call, [])
        return tree
    lengths = _gather_numbers(call, [len(leaf) if leaf.ndim else 1 for leaf in leaves])
    layouts = [
        layout_of(
            TensorInformation(torch.Size([count, *leaf.shape[1:]]), leaf.dtype)
            for leaf, count in zip(leaves, row, strict=True)
        )
        for row in lengths
    ]
    longest = max(layout.total for layout in layouts)
    if all(row == lengths[0] for row in lengths):
        table = comm.gather(pack(leaves, layouts[0], comm.device)).view(comm.size, longest)
        return restore(tree, unpack_rows(aligned(table, layouts[0].alignment), layouts[0]))

    buffer = torch.empty(longest, dtype=torch.uint8, device=comm.device)
    layout = layouts[comm.rank]
    buffer[: layout.total] = pack(leaves, layout, comm.device)
    table = comm.gather(buffer).view(comm.size, longest)
    parts = [unpack(row, layout) for row, layout in zip(table, layouts, strict=True)]
    return restore(tree, [torch.cat(pieces) for pieces in zip(*parts, strict=True)])


def _gather_numbers(call: Call, numbers: list[int]) -> list[list[int]]:
    """Return the numbers of every rank, one row per rank, after checking the call."""
    sent = torch.tensor(numbers, dtype=torch.int64, device=call.comm.device)
    table, layout = messages.gather(call, [sent], to_host=True)
    (rows_of_numbers,) = unpack_rows(table, layout)
    gathered: list[list[int]] = rows_of_numbers.view(call.comm.size, len(numbers)).tolist()
    return gathered


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
    leaves, key = read(tree)
    problem = _problem("reduce", leaves, key)
    if problem is None and op in ("max", "min") and any(leaf.is_complex() for leaf in leaves):
        problem = TypeError(f"reduce() cannot take the {op} of complex numbers.")
    if comm.size > 1:
        call = Call(comm, f"reduce({op})", key)
        if problem is not None:
            messages.reduce(call, {})
            raise problem
        reduced = _reduce_all(leaves, op, call)
    elif problem is not None:
        raise problem
    else:
        reduced = _reduce_alone(leaves, op)
    return restore(tree, [leaf * scale for leaf in reduced] if scale != 1.0 else reduced)


def _reduce_alone(tensors: list[torch.Tensor], op: ReduceOp) -> list[torch.Tensor]:
    # Return copies, as with several processes: zeroing the input afterwards must not change the
    # result.
    return [
        leaf.clone()
        if op != "mean" or leaf.is_floating_point() or leaf.is_complex()
        else leaf.float()
        for leaf in tensors
    ]


def _reduce_all(tensors: list[torch.Tensor], op: ReduceOp, call: Call) -> list[torch.Tensor]:
    members: dict[Form, list[int]] = defaultdict(list)
    flat: dict[Form, list[torch.Tensor]] = defaultdict(list)
    for index, leaf in enumerate(tensors):
        values, form_op = _encoded(leaf.detach().to(call.comm.device), op)
        members[values.dtype, form_op].append(index)
        flat[values.dtype, form_op].append(values)

    reduced: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
    for form, total in messages.reduce(call, flat).items():
        pieces = torch.split(total, [len(values) for values in flat[form]])
        for index, piece in zip(members[form], pieces, strict=True):
            # Don't share memory between results, because some file formats refuse it.
            result = piece.clone() if len(pieces) > 1 else piece
            reduced[index] = _decoded(result, tensors[index], op)
    return reduced


def _encoded(leaf: torch.Tensor, op: ReduceOp) -> tuple[torch.Tensor, ReduceOp]:
    """Return the flattened leaf in a dtype that groups can reduce, and the operation to use."""
    flat = leaf.reshape(-1)
    if leaf.is_complex():
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
    leaves, key = read(tree)
    call = Call(comm, f"broadcast(from_process={from_process})", key)
    problem = _problem("broadcast", leaves, key)
    if problem is not None:
        messages.reduce(call, {})
        raise problem
    received = unpack(*messages.broadcast(call, leaves, from_process))
    if comm.rank == from_process:
        return restore(tree, [leaf.to(comm.device) for leaf in leaves])
    pairs = zip(leaves, received, strict=True)
    return restore(tree, [_write_into(leaf, value) for leaf, value in pairs])


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
    leaves, key = read(tree)
    call = Call(comm, f"pad_across_processes(dim={list(dims)})", key, Rule(dims, lengths=False))
    problem = _problem("pad_across_processes", leaves, key, dense=False)
    if problem is not None:
        messages.gather(call, [])
        raise problem
    if any(leaf.is_nested for leaf in leaves):
        warn(
            "A nested tensor cannot be padded across processes, so it is unchanged. Convert it "
            "with to_padded_tensor first.",
            CannotPadNestedTensorWarning,
        )
    padded_dims = [[each for each in dims if _has_dim(leaf, each)] for leaf in leaves]
    pairs = list(zip(leaves, padded_dims, strict=True))
    lengths = _gather_numbers(call, [leaf.shape[at] for leaf, its_dims in pairs for at in its_dims])
    longest = (max(column) for column in zip(*lengths, strict=True))
    padded = []
    for leaf, its_dims in pairs:
        for at in its_dims:
            leaf = _pad(leaf, at, next(longest), pad_index, pad_first)
        padded.append(leaf)
    return restore(tree, padded)


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


def check_objects(comm: Communicator) -> None:
    """Raise an error on all ranks unless all call this, and none a collective on tensors instead."""
    if comm.size > 1:
        messages.gather(Call(comm, "gather_for_metrics", "not only tensors"), [])


def _problem(
    verb: str, leaves: list[Any], key: Hashable, *, dense: bool = True
) -> TypeError | None:
    """Return an error if a leaf is not a tensor, or not a dense one."""
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            return TypeError(
                f"{verb} takes tensors in nested lists, tuples, mappings and dataclasses, not "
                f"a {type(leaf).__name__}{_at(key, index)}. For other objects use gather_object "
                f"or broadcast_object_list."
            )
        if dense and (leaf.layout is not torch.strided or leaf.is_nested):
            return TypeError(
                f"{verb} takes dense tensors, but the tensor{_at(key, index)} is not dense (layout "
                f"{leaf.layout}). Convert it with to_dense or to_padded_tensor first."
            )
    return None


def _at(key: Hashable, index: int) -> str:
    path, _ = list(rows(key))[index]
    return f" at {path}" if path else ""
