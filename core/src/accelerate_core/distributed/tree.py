"""Walk nested structures of tensors, and rebuild them with other leaves.

A *tree* is any nesting of lists, tuples, named tuples, mappings and dataclass instances. Everything else is
a leaf. Leaves are in the order in which the containers iterate, or in the order of dataclass fields.
Containers keep their type.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import is_
from typing import Any, TypeGuard

import torch


@dataclass(frozen=True)
class TensorInformation:
    """The shape and dtype of a tensor, for allocating a similar one."""

    shape: torch.Size
    dtype: torch.dtype


# --- one node ---------------------------------------------------------------------------------


def is_namedtuple(data: Any) -> bool:
    """Return whether the object looks like a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def is_sequence(data: object) -> TypeGuard[Sequence[Any]]:
    """Return whether the object is an inner node with children by position."""
    return isinstance(data, (list, tuple)) and not isinstance(data, torch.Size)


def is_record(data: Any) -> bool:
    """Return whether the object is a dataclass instance, which is an inner node of a tree."""
    kind = type(data)
    return hasattr(kind, "__dataclass_fields__") and kind is not TensorInformation


def record_items(data: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance by name, without fields that are not set."""
    names = [field.name for field in fields(data)]
    return {name: getattr(data, name) for name in names if hasattr(data, name)}


def children(node: object) -> Collection[Any] | None:
    """Return the children of an inner node in order, or None for a leaf."""
    # Check the usual types first, because the check for a Mapping is slow.
    if type(node) is tuple or type(node) is list:
        return node
    if type(node) is dict:
        return node.values()
    if isinstance(node, torch.Tensor):
        return None
    if is_sequence(node):
        return node
    if isinstance(node, Mapping):
        return [node[key] for key in node]
    return record_items(node).values() if is_record(node) else None


def columns(nodes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return one tuple per position, or per key of mappings, with that child of every node.

    Raises:
        KeyError, ValueError: the nodes have different keys or lengths.
    """
    if isinstance(nodes[0], Mapping):
        return [tuple(node[key] for node in nodes) for key in nodes[0]]
    return list(zip(*(children(node) or () for node in nodes), strict=True))


def rebuild(node: Any, items: list[Any]) -> Any:
    """Return an inner node of the same type as `node`, with the children `items`.

    A dict subclass is copied and refilled instead of constructed, because its constructor may take other
    arguments (as that of `defaultdict`) and it may have additional attributes.
    """
    kind = type(node)
    if is_sequence(node):
        return honor_type(node, items)
    if kind is dict:
        return dict(zip(node, items, strict=True))
    if isinstance(node, dict):
        rebuilt = copy.copy(node)
        for key, value in zip(node, items, strict=True):
            rebuilt[key] = value
        return rebuilt
    if isinstance(node, Mapping):
        return kind(dict(zip(node, items, strict=True)))
    return rebuild_record(node, dict(zip(record_items(node), items, strict=True)))


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Build a sequence of the type of `obj` (list, tuple, named tuple, ...) from new elements.

    Args:
        generator: the new elements, in order.
    """
    items = list(generator)
    if type(obj) is list:
        return items
    return type(obj)(*items) if is_namedtuple(obj) else type(obj)(items)


def rebuild_record(data: Any, items: Mapping[str, Any]) -> Any:
    """Return a copy of a dataclass instance, frozen or not, with other values."""
    rebuilt = copy.copy(data)
    for name, value in items.items():
        object.__setattr__(rebuilt, name, value)
    return rebuilt


# --- whole trees ------------------------------------------------------------------------------


def flatten(tree: Any) -> list[Any]:
    """Return the leaves of a tree in order."""
    leaves: list[Any] = []
    _collect(tree, leaves)
    return leaves


def _collect(node: Any, into: list[Any]) -> None:
    inner = children(node)
    if inner is None:
        into.append(node)
        return
    for child in inner:
        if type(child) is torch.Tensor:  # the usual case
            into.append(child)
        else:
            _collect(child, into)


def map_leaves(func: Callable[[Any], Any], data: Any) -> Any:
    """Return the tree with `func` applied to every leaf, in leaf order."""
    inner = None if type(data) is torch.Tensor else children(data)
    if inner is None:
        return func(data)
    items = []
    for child in inner:
        items.append(func(child) if type(child) is torch.Tensor else map_leaves(func, child))
    return rebuild(data, items)


def map_tensors(func: Callable[[torch.Tensor], Any], data: Any) -> Any:
    """Return the tree with `func` applied to every tensor. Other leaves don't change."""
    return map_leaves(lambda leaf: func(leaf) if isinstance(leaf, torch.Tensor) else leaf, data)


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """Move every tensor of a tree, and every object with a `.to` method, to a device.

    Objects and containers that are already on the device are returned unchanged, not copied. Values under
    `skip_keys` (in mappings, at any depth) are not moved.

    Example:
        batch = send_to_device({"x": x, "y": y}, accelerator.device, non_blocking=True)
    """
    target = device if isinstance(device, torch.device) else torch.device(device)
    skipped = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())
    return _send(tensor, target, non_blocking, skipped)


def _send(data: Any, device: torch.device, non_blocking: bool, skipped: tuple[str, ...]) -> Any:
    if isinstance(data, torch.Tensor):
        return data if data.device == device else data.to(device, non_blocking=non_blocking)
    partly = bool(skipped) and isinstance(data, Mapping)
    # Use the `.to` of the object itself, unless some of its keys are skipped.
    if not partly and callable(getattr(data, "to", None)):
        return _move_object(data, device, non_blocking)
    inner = children(data)
    if inner is None:
        return data
    if partly:
        items = [
            item if key in skipped else _send(item, device, non_blocking, skipped)
            for key, item in zip(data, inner, strict=True)
        ]
    else:
        items = [_send(item, device, non_blocking, skipped) for item in inner]
    return data if all(map(is_, items, inner)) else rebuild(data, items)


def _move_object(data: Any, device: torch.device, non_blocking: bool) -> Any:
    if not non_blocking:
        return data.to(device)
    try:
        return data.to(device, non_blocking=True)
    except TypeError:  # a `.to` that only takes a device
        return data.to(device)


def get_data_structure(data: Any) -> Any:
    """Return the tree with every tensor replaced by a `TensorInformation`."""
    return map_tensors(lambda leaf: TensorInformation(leaf.shape, leaf.dtype), data)


def convert_to_fp32(tensor: Any) -> Any:
    """Return the tree with float16 and bfloat16 tensors as float32. Gradients flow through."""
    return map_leaves(_to_fp32, tensor)


def _to_fp32(leaf: Any) -> Any:
    is_half = isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)
    return leaf.float() if is_half else leaf
