"""Cut the global steps that rank 0 reads into the parts of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accelerate_core.plugin import StepReader


@dataclass(eq=False)
class DispatchSteps(StepReader):
    """Global steps of which rank 0 has all samples.

    Args:
        slice_fn: the user's `(data, tensor_slice, process_index=, num_processes=) -> part`.
        evenly: pad the last step only until its parts are equal, not to full batches.
    """

    slice_fn: Callable[..., Any] | None = None
    evenly: bool = False

    @classmethod
    def of(
        cls, steps: StepReader, slice_fn: Callable[..., Any] | None, evenly: bool
    ) -> DispatchSteps:
        """Return the same steps, cut for dispatching."""
        return cls(
            steps.num_processes,
            steps.split_batches,
            steps.even_batches,
            steps.drop_last,
            batch_size=steps.batch_size,
            slice_fn=slice_fn,
            evenly=evenly,
        )

    def width(self, size: int) -> int:
        if self.evenly and self.fills:
            return -(-size // self.num_processes)
        return super().width(size)

    def deal_full(self, group: list[Any], sizes: list[int | None]) -> list[Any]:
        size = sizes[0]
        if self.slice_fn is None or not size or len(set(sizes)) > 1:
            return group
        try:
            return self.cut_parts(self.join(group), size, size * self.num_processes)
        except TypeError:  # batches of this type cannot be joined
            return group

    def padded_size(self, short: bool, real: int | None) -> int | None:
        if self.evenly and real:
            return -(-real // self.num_processes)
        return (
            self._size
            if self.evenly or self.slice_fn is not None
            else super().padded_size(short, real)
        )

    def cut_part(self, batch: Any, part: slice, total: int, rank: int) -> Any:
        if self.slice_fn is None:
            return super().cut_part(batch, part, total, rank)
        return self.slice_fn(batch, part, process_index=rank, num_processes=self.num_processes)
