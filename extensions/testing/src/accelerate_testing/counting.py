"""Count the collectives and bytes of torch.distributed inside a block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accelerate_core.plugin import flatten

__all__ = ["Communication", "count_communication"]

_REDUCES = ("reduce", "send", "all_to_all", "alltoall")


@dataclass
class Communication:
    """The collectives that one rank took part in."""

    #: Name of the collective -> number of calls.
    calls: Counter[str] = field(default_factory=Counter)
    #: Bytes of the tensors that this rank passed to all of them together.
    bytes: int = 0

    @property
    def total(self) -> int:
        """Number of calls of all collectives."""
        return sum(self.calls.values())

    @property
    def reductions(self) -> int:
        """Number of calls that can combine data of several ranks, such as gradients."""
        return sum(n for name, n in self.calls.items() if any(word in name for word in _REDUCES))


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, found: Communication) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Every process group is called through these, also by reducers written in C++.
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.found.calls[func.__name__.split(".")[0].strip("_")] += 1
            tensors = (leaf for leaf in flatten(args) if isinstance(leaf, torch.Tensor))
            self.found.bytes += sum(tensor.nbytes for tensor in tensors)
        return func(*args, **(kwargs or {}))


@contextmanager
def count_communication() -> Iterator[Communication]:
    """Yield a `Communication` that counts while the block runs.

    Bytes include all tensors that a call gets, including those for its result, so compare only blocks
    that use the same collectives. Communication outside of torch.distributed is not counted.
    """
    found = Communication()
    with _Counting(found):
        yield found
