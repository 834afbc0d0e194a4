"""The check before a collective in debug mode: do the structures of all ranks fit together?

A group that is given unequal sizes may hang or end the process without a Python error, so the
comparison has to come first, over a collective that takes any size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accelerate_core.distributed.communicator import Communicator
from accelerate_core.distributed.tree import children, is_sequence, iterate_leaves, record_items
from accelerate_core.errors import DistributedOperationException

_ADVICE = {
    "gather": (
        "Bring the tensors to one shape first (pad_across_processes), or use gather_uneven if "
        "only dimension 0 differs, or gather_object."
    ),
    "gather_uneven": "Only dimension 0 may differ between the processes.",
    "pad_across_processes": "Only the padded dimension may differ between the processes.",
}
_DEFAULT_ADVICE = "Structures, shapes and dtypes have to be equal on all processes."


def describe(tree: Any) -> str:
    """Return the shapes and dtypes of a tree on one line, e.g. `{'x': [2, 3] float32}`."""
    if isinstance(tree, torch.Tensor):
        return f"{list(tree.shape)} {_dtype(tree.dtype)}"
    inner = children(tree)
    if inner is None:
        return f"<{type(tree).__name__}>"
    texts = map(describe, inner)
    if is_sequence(tree):
        return ("[{}]" if isinstance(tree, list) else "({})").format(", ".join(texts))
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{key!r}: {text}" for key, text in zip(tree, texts)) + "}"
    named = (f"{name}={text}" for name, text in zip(record_items(tree), texts))
    return f"{type(tree).__name__}({', '.join(named)})"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fingerprint(tree: Any, free_dim: Sequence[int]) -> list[tuple[Any, ...]]:
    """Return what has to be equal on all ranks; lengths along `free_dim` are left out."""
    rows: list[tuple[Any, ...]] = []
    for path, leaf in iterate_leaves(tree):
        if not isinstance(leaf, torch.Tensor):
            rows.append((path, type(leaf).__name__))
            continue
        free = {dim % leaf.ndim for dim in free_dim if -leaf.ndim <= dim < leaf.ndim}
        shape = [-1 if dim in free else length for dim, length in enumerate(leaf.shape)]
        rows.append((path, shape, _dtype(leaf.dtype)))
    return rows


def verify(verb: str, tree: Any, comm: Communicator, free_dim: Sequence[int] = ()) -> None:
    """Raise `DistributedOperationException` on every rank if the trees do not fit together.

    Does nothing unless `comm.debug`. `free_dim` are the dimensions whose lengths may differ.
    """
    if not comm.debug or comm.size == 1:
        return
    reports = comm.gather_object((_fingerprint(tree, free_dim), describe(tree)))
    if all(report[0] == reports[0][0] for report in reports):
        return
    lines = "\n".join(f"  - process {rank}: {text}" for rank, (_, text) in enumerate(reports))
    raise DistributedOperationException(
        f"{verb}: the processes passed tensors that do not fit together.\n{lines}\n"
        f"{_ADVICE.get(verb, _DEFAULT_ADVICE)}"
    )
