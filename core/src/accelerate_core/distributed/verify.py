"""The check before a collective in debug mode: do the structures of all ranks fit together?

A group that is given unequal sizes may hang or end the process without a Python error, so the
comparison has to come first, over a collective that takes any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from accelerate_core.distributed.communicator import Communicator
from accelerate_core.distributed.tree import iterate_leaves
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


def _row(path: str, leaf: Any, free_dim: Sequence[int]) -> tuple[str, tuple[Any, ...]]:
    """Return what is shown of a leaf, and what of it has to be equal on all ranks."""
    if not isinstance(leaf, torch.Tensor):
        kind = type(leaf).__name__
        return f"{path} <{kind}>", (path, kind)
    dtype = str(leaf.dtype).removeprefix("torch.")
    free = {dim % leaf.ndim for dim in free_dim if -leaf.ndim <= dim < leaf.ndim}
    fixed = [-1 if dim in free else length for dim, length in enumerate(leaf.shape)]
    return f"{path} {list(leaf.shape)} {dtype}", (path, fixed, dtype)


def verify(verb: str, tree: Any, comm: Communicator, free_dim: Sequence[int] = ()) -> None:
    """Raise `DistributedOperationException` on every rank if the trees do not fit together.

    Does nothing unless `comm.debug`. `free_dim` are the dimensions whose lengths may differ.
    """
    if not comm.debug or comm.size == 1:
        return
    rows = [_row(path, leaf, free_dim) for path, leaf in iterate_leaves(tree)]
    reports = comm.gather_object(rows)
    compared = [[has_to_be_equal for _, has_to_be_equal in report] for report in reports]
    if all(one == compared[0] for one in compared):
        return
    lines = "\n".join(
        f"  - process {rank}: {', '.join(text.strip() for text, _ in report) or 'no tensor'}"
        for rank, report in enumerate(reports)
    )
    raise DistributedOperationException(
        f"{verb}: the processes passed tensors that do not fit together.\n{lines}\n"
        f"{_ADVICE.get(verb, _DEFAULT_ADVICE)}"
    )
