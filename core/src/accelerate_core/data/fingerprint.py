"""Digests of indices, for comparing what ranks read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

#: How many indices at the start of an order are compared.
COMPARED = 1024


def comparable_entry(entry: Any) -> Any:
    """Return an index, or a batch of indices, as values whose `repr` is the same in every process."""
    if isinstance(entry, (list, tuple)):
        return [comparable_entry(each) for each in entry]
    if hasattr(entry, "tolist"):  # a tensor, an array or a number of NumPy
        return entry.tolist()
    if isinstance(entry, (int, float, str, bytes)):
        return entry
    return type(entry).__name__


def digest_of_order(entries: Iterable[Any]) -> int:
    """Return a digest of the start of an order, equal in all processes that read the same.

    Args:
        entries: indices, or batches of indices; about the first 1,024 indices count.
    """
    compared = []
    left = COMPARED
    for entry in entries:
        compared.append(comparable_entry(entry))
        left -= len(entry) if isinstance(entry, (list, tuple)) else 1
        if left <= 0:
            break
    return digest_of(compared)


def digest_of(value: Any) -> int:
    """Return a digest of the `repr` of a value."""
    return int(hashlib.blake2b(repr(value).encode(), digest_size=7).hexdigest(), 16)
