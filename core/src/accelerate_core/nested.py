"""Walking nested structures of tensors: lists, tuples, mappings and what their types are.

A *tree* here is any nesting of lists, tuples, named tuples, mappings and instances of dataclasses;
everything else is a leaf. The order of the leaves is that of iteration, or of the fields.
Containers keep their type.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

__all__ = [
    "TensorInformation",
    "concatenate",
    "convert_to_fp32",
    "find_batch_size",
    "find_device",
    "get_data_structure",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_namedtuple",
    "is_record",
    "is_tensor_information",
    "is_torch_tensor",
    "iterate_leaves",
    "leaves_of",
    "listify",
    "map_leaves",
    "pad_input_tensors",
    "rebuild_mapping",
    "rebuild_record",
    "record_items",
    "recursively_apply",
    "send_to_device",
    "slice_tensors",
]

Device = torch.device | str | int


@dataclass(frozen=True)
class TensorInformation:
    """What is needed to allocate a tensor like another one: its shape and dtype."""

    shape: torch.Size
    dtype: torch.dtype


def is_torch_tensor(tensor: Any) -> bool:
    """Say whether the object is a `torch.Tensor`."""
    return isinstance(tensor, torch.Tensor)


def is_tensor_information(tensor_info: Any) -> bool:
    """Say whether the object is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: Any) -> bool:
    """Say whether the object looks like an instance of a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Build a sequence of the type of `obj` (list, tuple, named tuple, ...) from new elements."""
    items = list(generator)
    if type(obj) is list:
        return items
    return type(obj)(*items) if is_namedtuple(obj) else type(obj)(items)


def rebuild_mapping(data: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Build a mapping of the type of `data` with the same keys and new values.

    A dict subclass is copied and refilled, not constructed: it may want other arguments (a
    `defaultdict`) and may carry attributes beside its items.
    """
    if type(data) is dict:
        return items
    if isinstance(data, dict):
        rebuilt = copy.copy(data)
        for key, value in items.items():
            rebuilt[key] = value
        return rebuilt
    return type(data)(items)  # type: ignore[call-arg]


def is_record(data: Any) -> bool:
    """Say whether the object is an instance of a dataclass, and so an inner node of a tree."""
    kind = type(data)
    return hasattr(kind, "__dataclass_fields__") and kind is not TensorInformation


def record_items(data: Any) -> dict[str, Any]:
    """Return the fields of an instance of a dataclass by name, as far as they are set."""
    names = [field.name for field in fields(data)]
    return {name: getattr(data, name) for name in names if hasattr(data, name)}


def rebuild_record(data: Any, items: Mapping[str, Any]) -> Any:
    """Return a copy of an instance of a dataclass, frozen or not, with other values."""
    rebuilt = copy.copy(data)
    for name, value in items.items():
        object.__setattr__(rebuilt, name, value)
    return rebuilt


def is_sequence(data: Any) -> bool:
    """Say whether the object is an inner node of a tree that holds its children by position."""
    return isinstance(data, (list, tuple)) and not isinstance(data, torch.Size)


def map_leaves(func: Callable[[Any], Any], data: Any) -> Any:
    """Return the tree with `func` applied to every leaf, in leaf order."""
    # The usual types first: asking whether something is a Mapping is slow.
    kind = type(data)
    if kind is torch.Tensor:
        return func(data)
    if kind is tuple:
        return tuple([map_leaves(func, item) for item in data])
    if kind is list:
        return [map_leaves(func, item) for item in data]
    if kind is dict:
        return {key: map_leaves(func, item) for key, item in data.items()}
    if isinstance(data, torch.Tensor):
        return func(data)
    if is_sequence(data):
        return honor_type(data, [map_leaves(func, item) for item in data])
    if isinstance(data, Mapping):
        return rebuild_mapping(data, {key: map_leaves(func, data[key]) for key in data})
    if is_record(data):
        items = record_items(data)
        return rebuild_record(data, {name: map_leaves(func, items[name]) for name in items})
    return func(data)


def iterate_leaves(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `(path, leaf)` for every leaf; the path reads like the code that gets there."""
    if isinstance(data, torch.Tensor):
        yield path, data
    elif is_sequence(data):
        for index, item in enumerate(data):
            yield from iterate_leaves(item, f"{path}[{index}]")
    elif isinstance(data, Mapping):
        for key in data:
            yield from iterate_leaves(data[key], f"{path}[{key!r}]")
    elif is_record(data):
        for name, value in record_items(data).items():
            yield from iterate_leaves(value, f"{path}.{name}")
    else:
        yield path, data


def leaves_of(data: Any) -> list[Any]:
    """Return the leaves of a tree in order."""
    leaves: list[Any] = []
    _collect(data, leaves)
    return leaves


def _collect(data: Any, into: list[Any]) -> None:
    kind = type(data)
    if kind is torch.Tensor:
        into.append(data)
    elif kind is tuple or kind is list:
        for item in data:
            _collect(item, into)
    elif kind is dict:
        for item in data.values():
            _collect(item, into)
    elif isinstance(data, torch.Tensor):
        into.append(data)
    elif is_sequence(data):
        for item in data:
            _collect(item, into)
    elif isinstance(data, Mapping):
        for key in data:
            _collect(data[key], into)
    elif is_record(data):
        for value in record_items(data).values():
            _collect(value, into)
    else:
        into.append(data)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply `func(leaf, *args, **kwargs)` to every leaf that passes `test_type`.

    Other leaves are kept as they are, or raise `TypeError` if `error_on_other_type`.

        recursively_apply(torch.square, {"a": torch.ones(2), "name": "x"})
    """

    def visit(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(
                f"{_name(func)} does not take a {type(leaf).__name__}: only nested lists, tuples, "
                f"mappings and dataclasses of objects for which {_name(test_type)} is true."
            )
        return leaf

    return map_leaves(visit, data)


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", repr(func))


def send_to_device(
    tensor: Any,
    device: Device,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """Move every tensor of a tree, and every object with a `.to` method, to a device.

    What is already there is returned as the very same object, containers included. The values
    under `skip_keys` (in mappings, at any depth) stay where they are.

        batch = send_to_device(batch, "cuda", non_blocking=True)
    """
    target = device if isinstance(device, torch.device) else torch.device(device)
    skipped = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())
    return _send(tensor, target, non_blocking, skipped)


def _send(data: Any, device: torch.device, non_blocking: bool, skipped: tuple[str, ...]) -> Any:
    if isinstance(data, torch.Tensor):
        return data if data.device == device else data.to(device, non_blocking=non_blocking)
    is_mapping = isinstance(data, Mapping)
    # An object that moves itself knows best, unless some of its keys are to be left behind.
    if not (is_mapping and skipped) and callable(getattr(data, "to", None)):
        return _move_object(data, device, non_blocking)
    if is_sequence(data):
        items = [_send(item, device, non_blocking, skipped) for item in data]
        if all(new is old for new, old in zip(items, data, strict=True)):
            return data
        return honor_type(data, items)
    if is_mapping:
        moved = {
            key: data[key] if key in skipped else _send(data[key], device, non_blocking, skipped)
            for key in data
        }
        if all(moved[key] is data[key] for key in moved):
            return data
        return rebuild_mapping(data, moved)
    if is_record(data):
        values = record_items(data)
        moved = {name: _send(values[name], device, non_blocking, skipped) for name in values}
        if all(moved[name] is values[name] for name in values):
            return data
        return rebuild_record(data, moved)
    return data


def _move_object(data: Any, device: torch.device, non_blocking: bool) -> Any:
    if not non_blocking:
        return data.to(device)
    try:
        return data.to(device, non_blocking=True)
    except TypeError:  # a `.to` that only knows the device
        return data.to(device)


def get_data_structure(data: Any) -> Any:
    """Return the tree with a `TensorInformation` in the place of every tensor."""
    return recursively_apply(lambda leaf: TensorInformation(leaf.shape, leaf.dtype), data)


def initialize_tensors(data_structure: Any, device: Device | None = None) -> Any:
    """Return the tree with an uninitialised tensor in the place of every `TensorInformation`."""
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype, device=device),
        data_structure,
        test_type=is_tensor_information,
    )


def find_batch_size(data: Any) -> int:
    """Return the length of dimension 0 of the first tensor that has one.

    Raises `ValueError` if the tree is empty or has only 0-d tensors, `TypeError` if it has
    leaves but no tensor among them.
    """
    leaves = []
    for _, leaf in iterate_leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.ndim > 0:
            return int(leaf.shape[0])
        leaves.append(leaf)
    if not leaves:
        raise ValueError(f"An empty {type(data).__name__} has no batch size.")
    if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise ValueError("A 0-d tensor has no batch size.")
    raise TypeError(f"Only tensors have a batch size, not a {type(leaves[0]).__name__}.")


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return `find_batch_size(data)`, or None where it would raise."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor of the tree, or None if it holds no tensor."""
    for _, leaf in iterate_leaves(data):
        if isinstance(leaf, torch.Tensor):
            return leaf.device
    return None


def listify(data: Any) -> Any:
    """Return the tree with every tensor as nested lists of Python numbers (0-d: a number)."""
    return recursively_apply(lambda leaf: leaf.detach().tolist(), data)


def slice_tensors(
    data: Any,
    tensor_slice: Any,
    process_index: int | None = None,
    num_processes: int | None = None,
) -> Any:
    """Index every tensor of the tree with `tensor_slice`; 0-d tensors and others are kept.

    `process_index` and `num_processes` are not used here: they are part of the signature that a
    user's own slicing function for dispatched batches has to have.
    """
    return recursively_apply(lambda leaf: leaf[tensor_slice] if leaf.ndim else leaf, data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate trees of equal structure, leaf by leaf, along `dim`; 0-d leaves are stacked.

    Raises `TypeError` for a leaf that is not a tensor.

        concatenate([{"x": torch.zeros(2, 3)}, {"x": torch.ones(4, 3)}])["x"].shape  # [6, 3]
    """
    first = data[0]
    if is_sequence(first):
        return honor_type(
            first, [concatenate([tree[i] for tree in data], dim) for i in range(len(first))]
        )
    if isinstance(first, Mapping):
        return rebuild_mapping(
            first, {key: concatenate([tree[key] for tree in data], dim) for key in first}
        )
    if is_record(first):
        trees = [record_items(tree) for tree in data]
        return rebuild_record(
            first, {name: concatenate([tree[name] for tree in trees], dim) for name in trees[0]}
        )
    if not isinstance(first, torch.Tensor):
        raise TypeError(f"Only tensors can be concatenated, not a {type(first).__name__}.")
    return torch.stack(list(data)) if first.ndim == 0 else torch.cat(list(data), dim=dim)


def convert_to_fp32(tensor: Any) -> Any:
    """Return the tree with every float16 and bfloat16 tensor as float32; autograd passes."""
    return recursively_apply(
        lambda leaf: leaf.float(),
        tensor,
        test_type=lambda leaf: (
            isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)
        ),
    )


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Lengthen every tensor along `dim` so that a batch divides evenly among processes.

    The last entry is repeated until the length of `batch_size` is the next multiple of
    `num_processes`. Tensors of another length along `dim`, and 0-d ones, are kept.

        pad_input_tensors(torch.zeros(3, 4, 4), 3, 4).shape  # [4, 4, 4]
    """
    missing = -batch_size % num_processes

    def pad(leaf: torch.Tensor) -> torch.Tensor:
        if missing == 0 or not -leaf.ndim <= dim < leaf.ndim or leaf.shape[dim] != batch_size:
            return leaf
        last = leaf.narrow(dim, batch_size - 1, 1)
        counts = [1] * leaf.ndim
        counts[dim] = missing
        return torch.cat([leaf, last.repeat(counts)], dim=dim)

    return recursively_apply(pad, tensor, error_on_other_type=True)
