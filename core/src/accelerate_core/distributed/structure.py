"""Read trees of tensors in an order that is the same on all ranks, and describe their structure.

Ranks may create the keys of a mapping in different orders, so mappings are read by sorted key if all keys are
strings. Everything else is read in the order of the containers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from accelerate_core.distributed.tree import children, is_record, rebuild, record_items


class TensorKey(NamedTuple):
    """A dense or nested tensor. `shape` is None for a nested tensor, whose lengths aren't numbers."""

    shape: torch.Size | None
    dtype: torch.dtype


class NodeKey(NamedTuple):
    """A container. `names` are the parts of the paths of its children; None means positions."""

    names: tuple[str, ...] | None
    parts: tuple[Hashable, ...]


class Rule(NamedTuple):
    """What must be equal on all ranks, besides the paths of the leaves.

    Args:
        free_dims: dimensions whose lengths may differ.
        lengths: False if dtypes and shapes may differ as long as the tensors have the `free_dims`.
    """

    free_dims: tuple[int, ...] = ()
    lengths: bool = True


#: Structures, shapes and dtypes must be equal.
EXACT = Rule()


def read(tree: Any) -> tuple[list[Any], Hashable]:
    """Return the leaves of a tree, and a hashable description of its structure."""
    leaves: list[Any] = []
    return leaves, _read(tree, leaves)


def _read(node: Any, leaves: list[Any]) -> Hashable:
    if isinstance(node, torch.Tensor):
        leaves.append(node)
        if node.layout is not torch.strided and not node.is_nested:
            return f"{node.layout} tensor"
        return TensorKey(None if node.is_nested else node.shape, node.dtype)
    inner = children(node)
    if inner is None:
        leaves.append(node)
        return type(node).__name__
    names = None
    if isinstance(node, Mapping):
        keys = _ordered_keys(node)
        names = tuple([f"[{_key_text(key)}]" for key in keys])
        inner = [node[key] for key in keys]
    elif is_record(node):
        names = tuple([f".{name}" for name in record_items(node)])
    return NodeKey(names, tuple([_read(child, leaves) for child in inner]))


def restore(like: Any, leaves: Iterable[Any]) -> Any:
    """Return a tree with the structure and key order of `like`, and other leaves in the order of `read`."""
    return _restore(like, iter(leaves))


def _restore(node: Any, leaves: Iterator[Any]) -> Any:
    inner = None if isinstance(node, torch.Tensor) else children(node)
    if inner is None:
        return next(leaves)
    if isinstance(node, Mapping):
        items = {key: _restore(node[key], leaves) for key in _ordered_keys(node)}
        return rebuild(node, [items[key] for key in node])
    return rebuild(node, [_restore(child, leaves) for child in inner])


def _ordered_keys(node: Mapping[Any, Any]) -> list[Any]:
    keys = list(node)
    return sorted(keys) if all(isinstance(key, str) for key in keys) else keys


def _key_text(key: object) -> str:
    text = repr(key)
    # The default text of an object contains its address, which differs between ranks.
    return type(key).__qualname__ if " at 0x" in text else text


# --- descriptions -----------------------------------------------------------------------------


def rows(key: Hashable, path: str = "") -> Iterator[tuple[str, Hashable]]:
    """Yield the path of every leaf, written as Python code, and its description."""
    if not isinstance(key, NodeKey):
        yield path, key
        return
    names: Sequence[str] = key.names or [f"[{index}]" for index in range(len(key.parts))]
    for name, part in zip(names, key.parts, strict=True):
        yield from rows(part, path + name)


def row_text(path: str, leaf: Hashable) -> str:
    """Describe a leaf in an error."""
    if not isinstance(leaf, TensorKey):
        return f"{path} <{leaf}>".strip()
    shape = "nested" if leaf.shape is None else str(list(leaf.shape))
    return f"{path} {shape} {str(leaf.dtype).removeprefix('torch.')}".strip()


@lru_cache(maxsize=1024)
def digest_of(label: str, key: Hashable, rule: Rule) -> int:
    """Return a digest of what must be equal on all ranks, as a signed integer of eight bytes."""
    text = repr((label, [(path, _fixed(leaf, rule)) for path, leaf in rows(key)]))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _fixed(leaf: Hashable, rule: Rule) -> Any:
    """Return the properties of a leaf that must be equal on all ranks."""
    if not isinstance(leaf, TensorKey):
        return leaf
    shape = leaf.shape
    if shape is None:
        return "nested"
    if not rule.lengths:
        return [-len(shape) <= dim < len(shape) for dim in rule.free_dims]
    free = {dim % len(shape) for dim in rule.free_dims if -len(shape) <= dim < len(shape)}
    lengths = [-1 if dim in free else length for dim, length in enumerate(shape)]
    return lengths, str(leaf.dtype)
