"""Count what ranks say to each other inside a block: calls of torch.distributed, and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accelerate_core.distributed.tree import flatten

__all__ = ["Communication", "count_communication"]

_REDUCES = ("reduce", "send", "all_to_all", "alltoall")


@dataclass
class Communication:
    """What one rank took part in."""

    #: Name of the collective -> how often it was called.
    calls: Counter[str] = field(default_factory=Counter)
    #: Bytes this rank put into all of them together.
    bytes: int = 0

    @property
    def total(self) -> int:
        """Calls of all collectives."""
        return sum(self.calls.values())

    @property
    def reductions(self) -> int:
        """Calls that can combine what several ranks have, such as gradients."""
        return sum(n for name, n in self.calls.items() if any(word in name for word in _REDUCES))


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, found: Communication) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Every backend's process group is called through these, reducers written in C++ as well.
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.found.calls[func.__name__.split(".")[0].strip("_")] += 1
            tensors = (leaf for leaf in flatten(args) if isinstance(leaf, torch.Tensor))
            self.found.bytes += sum(tensor.nbytes for tensor in tensors)
        return func(*args, **(kwargs or {}))


@contextmanager
def count_communication() -> Iterator[Communication]:
    """Yield a `Communication` that fills up while the block runs.

    Bytes are those of all tensors a call is given, the places for its result too; compare
    blocks that use the same collectives. What does not go through torch.distributed is not seen.
    """
    found = Communication()
    with _Counting(found):
        yield found
