"""The stream of indices a map-style loader reads from, which knows when it has ended.

It looks one batch of *indices* ahead, so the last batch is known without loading anything early.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate_core.data.order import iterate_from

__all__ = ["IndexIterator", "IndexStream"]

_END: Any = object()


class IndexStream:
    """Stands in a loader's place of the batch sampler (or sampler).

    Args:
        plan: yields this rank's batches; `plan.iterate(start)` is used to skip if it exists.

    `start` is where the next iteration begins, in batches of the single-process loader. With
    `keep` the first so many batches are given all the same, before those from `start` on: who
    fills up the end of the epoch needs them.
    """

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.start = 0
        self.keep = 0
        self.latest: IndexIterator | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("plan", "state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self.plan, name)

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> IndexIterator:
        self.latest = IndexIterator(self.plan, self.start, self.keep)
        return self.latest


class IndexIterator(Iterator[Any]):
    """One iteration: `count` batches were taken, `exhausted` says that none is left.

    Nothing is drawn before the first batch is asked for: PyTorch seeds its workers before that,
    and the order of draws from the global generator must stay PyTorch's.
    """

    def __init__(self, plan: Any, start: int, keep: int = 0) -> None:
        self.plan = plan
        self.start = start
        self.keep = keep if start else 0
        self.count = 0
        self.exhausted = False
        self._batches: Iterator[Any] | None = None
        self._next: Any = None

    def prime(self) -> None:
        """Draw the order now, and go to the start."""
        if self._batches is None:
            if hasattr(type(self.plan), "iterate"):
                self._batches = iter(self.plan.iterate(self.start))
            else:
                self._batches = iterate_from(self.plan, self.start, self.keep)
            self._advance()

    def _advance(self) -> None:
        assert self._batches is not None
        self._next = next(self._batches, _END)
        self.exhausted = self._next is _END

    def __next__(self) -> Any:
        if self._batches is None:
            self.prime()
        batch = self._next
        if batch is _END:
            raise StopIteration
        self._advance()
        self.count += 1
        return batch
