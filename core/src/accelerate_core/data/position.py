"""Where a loader stands in its epoch, and how to get back there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from accelerate_core.errors import ConfigurationError

__all__ = ["OrderState", "Position"]

VERSION = 1


@dataclass
class OrderState:
    """The generators that an epoch's order is drawn from, as they were before it began.

    `fresh`: worker processes began with it, for which the loader draws a seed first.
    """

    global_state: torch.Tensor
    generator: torch.Tensor | None = None
    fresh: bool = True

    @classmethod
    def capture(cls, generator: torch.Generator | None, fresh: bool = True) -> OrderState:
        """Copy the states as they are now."""
        own = None if generator is None else generator.get_state()
        return cls(torch.get_rng_state(), own, fresh)

    @contextmanager
    def replayed(self, generator: torch.Generator | None) -> Iterator[None]:
        """Draw from the states of then; afterwards the global generator is as it was.

        A generator of the user's is left where the draws bring it: that is where it stood in the
        run that is resumed.
        """
        before = torch.get_rng_state()
        torch.set_rng_state(self.global_state)
        if generator is not None and self.generator is not None:
            generator.set_state(self.generator)
        try:
            yield
        finally:
            torch.set_rng_state(before)


@dataclass
class Position:
    """Progress of one loader; what `skip_first_batches` makes of it shares the object.

    `batches` counts batches of the single-process loader, so it holds for any number of ranks.
    """

    epoch: int = 0
    batches: int = 0
    order: OrderState | None = None
    epoch_was_set: bool = False
    loader_state: Any = None
    pending: bool = False
    #: The last batch of the epoch was handed out.
    ended: bool = False
    #: Worker processes lived on from an earlier epoch in the run that is resumed.
    had_workers: bool = False
    owner: object = field(default=None, repr=False)

    def begin(self, owner: object, start: int, order: OrderState) -> None:
        """Note that an iteration begins at batch `start`."""
        self.owner = owner
        self.batches = start
        self.order = order
        self.pending = self.ended = self.had_workers = False

    def finish(self, owner: object) -> None:
        """Note that the epoch is over, if `owner` is the latest iteration."""
        if self.owner is owner:
            self.next_epoch()

    def next_epoch(self) -> None:
        """Stand before the first batch of the next epoch."""
        self.epoch += 1
        self.batches = 0
        self.order = None
        self.loader_state = None
        self.owner = None
        self.pending = self.ended = False

    def state_dict(
        self, batch_size: int | None, per_step: int, has_workers: bool = False
    ) -> dict[str, Any]:
        """Return the position as plain values and CPU tensors."""
        state: dict[str, Any] = {
            "version": VERSION,
            "epoch": self.epoch,
            "epoch_was_set": self.epoch_was_set,
            "batches_seen": self.batches // per_step,
            "global_batches": self.batches,
            "batch_size": batch_size,
            "samples_seen": None if batch_size is None else self.batches * batch_size,
            "ended": self.ended,
            "has_workers": not self.order.fresh if self.order else has_workers,
        }
        if self.order is not None:
            state["torch_rng"] = self.order.global_state
            if self.order.generator is not None:
                state["generator"] = self.order.generator
        if self.loader_state is not None:
            state["loader"] = self.loader_state
        return state

    def load_state_dict(
        self, state: dict[str, Any], batch_size: int | None, running: bool = False
    ) -> None:
        """Take over a position; the next iteration begins there.

        An iteration that is `running` and stands exactly there goes on instead.

        Raises:
            ConfigurationError: the state is of another kind, or was saved with a batch size by
                which its number of samples cannot be divided.
        """
        if state.get("version") != VERSION or "epoch" not in state:
            raise ConfigurationError(
                f"This is no position of a prepared loader of version {VERSION}: it has the keys "
                f"{sorted(map(str, state))}."
            )
        batches, saved_size = state["global_batches"], state.get("batch_size")
        if batches and batch_size != saved_size and None not in (batch_size, saved_size):
            if state["samples_seen"] % batch_size:
                raise ConfigurationError(
                    f"The position is {state['samples_seen']} samples into the epoch (batches of "
                    f"{saved_size}); that is no whole number of batches of {batch_size}."
                )
            batches = state["samples_seen"] // batch_size
        if running and self._is_here(state, int(batches)):
            return
        self.epoch = int(state["epoch"])
        self.epoch_was_set = bool(state.get("epoch_was_set", False))
        self.batches = int(batches)
        self.loader_state = state.get("loader")
        self.order = None
        self.had_workers = bool(state.get("has_workers", False))
        if "torch_rng" in state:
            fresh = not self.had_workers
            self.order = OrderState(state["torch_rng"], state.get("generator"), fresh)
        self.ended = bool(state.get("ended", False))
        self.pending = True
        self.owner = None

    def _is_here(self, state: dict[str, Any], batches: int) -> bool:
        return (
            self.order is not None
            and self.epoch == int(state["epoch"])
            and self.batches == batches
            and "torch_rng" in state
            and torch.equal(self.order.global_state, state["torch_rng"])
        )
