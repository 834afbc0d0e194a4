"""The source of batches of a dispatched loader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from accelerate_core.plugin import Communicator, Item, LoaderOptions, ReadSource, Step
from accelerate_dispatch.sending import dispatch_steps
from accelerate_dispatch.slicing import DispatchSteps
from accelerate_dispatch.transport import SOURCE


@dataclass(eq=False)
class DispatchedSource:
    """A loader that rank 0 reads for all ranks. Only rank 0 knows the loader's state.

    Args:
        reading: reads the loader in global steps.
        options: the ranks, and how they share the data.
    """

    reading: ReadSource
    options: LoaderOptions

    def __post_init__(self) -> None:
        options = self.options
        assert options.comm is not None, "several ranks share the data"
        self._comm = options.comm
        self._shard_of_rank = _shard_of_each_rank(options.comm, options)
        evenly = options.fixed_batch is None
        steps = DispatchSteps.of(self.reading.steps, options.slice_fn_for_dispatch, evenly)
        self.reading = replace(self.reading, steps=steps)
        self.per_step = self.reading.per_step
        self.filler = self.reading.filler

    @cached_property
    def _group(self) -> dist.ProcessGroup | None:
        """A process group for the messages only; all ranks create it at the first iteration."""
        return self._comm.open_group()

    def length(self) -> int:
        """Return the number of batches of an epoch; `TypeError` if it is unknown."""
        return self.reading.length()

    def start(self, batches: int, draw: bool, state: Any = None) -> Iterator[Item]:
        """Start an iteration.

        Args:
            batches: where to begin, in batches of the single-process loader.
            draw: not used: rank 0 draws the order when it reads.
            state: the dataset's own state; it takes precedence over `batches`.
        """
        group = self._group
        steps: Iterator[Step] | Exception | None = None
        if self._comm.rank == SOURCE:
            try:
                steps = self.reading.steps_from(batches, state)
            except Exception as error:  # sent in place of the first step, which the others wait for
                steps = error
        elif isinstance(self.reading.base, DataLoader):
            torch.empty((), dtype=torch.int64).random_()  # as the iterator of rank 0 does
        return dispatch_steps(
            steps,
            comm=self._comm,
            shard_of_rank=self._shard_of_rank,
            group=group,
            read_ahead=self.options.config.read_ahead,
        )


def _shard_of_each_rank(comm: Communicator, options: LoaderOptions) -> list[int]:
    """Return, for each rank of the communicator, the index of its part of a step."""
    if comm.size == options.num_processes and comm.rank == options.process_index:
        return list(range(comm.size))
    return comm.gather_object(options.process_index)
