"""Where a loader stands in its epoch, and how to get back there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from accelerate_core.errors import ConfigurationError

VERSION = 1


@dataclass
class OrderState:
    """The generators that an epoch's order is drawn from, as they were before it began."""

    torch_rng: torch.Tensor
    generator: torch.Tensor | None = None

    @classmethod
    def capture(cls, generator: torch.Generator | None) -> OrderState:
        """Copy the states as they are now."""
        return cls(torch.get_rng_state(), None if generator is None else generator.get_state())

    @contextmanager
    def replayed(self, generator: torch.Generator | None) -> Iterator[None]:
        """Draw from the states of then; afterwards the global generator is as it was.

        A generator of the user's is left where the draws bring it: that is where it stood in the
        run that is resumed.
        """
        before = torch.get_rng_state()
        torch.set_rng_state(self.torch_rng)
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
    `order` is that of the epoch, None before it is known. `loader_state` is the data's own.
    `kept_workers`: the epoch is read by worker processes of an earlier one.
    `owner` is the iteration that moves the position. Without one the next iteration begins here,
    be it loaded or the start of an epoch; else it begins the epoch anew.
    """

    epoch: int = 0
    epoch_was_set: bool = False
    batches: int = 0
    #: The last batch of the epoch was handed out.
    ended: bool = False
    order: OrderState | None = None
    loader_state: Any = None
    kept_workers: bool = False
    owner: object = field(default=None, repr=False)

    def start_of(self, epoch: int) -> None:
        """Stand before the first batch of an epoch."""
        self.epoch = epoch
        self.batches = 0
        self.ended = False
        self.order = None
        self.loader_state = None
        self.owner = None

    def state_dict(
        self, batch_size: int | None, per_step: int, has_workers: bool
    ) -> dict[str, Any]:
        """Return the position as plain values and CPU tensors.

        `has_workers`: there are worker processes that the next epoch will keep.
        """
        state: dict[str, Any] = {
            "version": VERSION,
            "epoch": self.epoch,
            "epoch_was_set": self.epoch_was_set,
            "batches_seen": self.batches // per_step,
            "global_batches": self.batches,
            "batch_size": batch_size,
            "samples_seen": None if batch_size is None else self.batches * batch_size,
            "ended": self.ended,
            "has_workers": self.kept_workers or (self.order is None and has_workers),
        }
        known = {"loader": self.loader_state}
        if self.order is not None:
            known.update(vars(self.order))
        return state | {name: value for name, value in known.items() if value is not None}

    def load_state_dict(self, state: dict[str, Any], batch_size: int | None) -> None:
        """Take over a position; the next iteration begins there.

        Raises:
            ConfigurationError: the state is of another kind, or was saved with a batch size by
                which its number of samples cannot be divided.
        """
        batches = _batches_of(state, batch_size)
        self.start_of(int(state["epoch"]))
        self.epoch_was_set = bool(state.get("epoch_was_set", False))
        self.batches = batches
        self.ended = bool(state.get("ended", False))
        self.loader_state = state.get("loader")
        self.kept_workers = bool(state.get("has_workers", False))
        if "torch_rng" in state:
            self.order = OrderState(state["torch_rng"], state.get("generator"))

    def is_at(self, state: dict[str, Any], batch_size: int | None) -> bool:
        """Whether this is the place in the epoch's order that a state names."""
        return (
            self.order is not None
            and "torch_rng" in state
            and (self.batches, self.epoch) == (_batches_of(state, batch_size), state["epoch"])
            and torch.equal(self.order.torch_rng, state["torch_rng"])
        )


def _batches_of(state: dict[str, Any], batch_size: int | None) -> int:
    """Return how many batches of this size a state is into its epoch."""
    if state.get("version") != VERSION or "epoch" not in state:
        raise ConfigurationError(
            f"This is no position of a prepared loader of version {VERSION}: it has the keys "
            f"{sorted(map(str, state))}."
        )
    batches = int(state["global_batches"])
    saved_size = state.get("batch_size")
    if not batches or batch_size == saved_size or batch_size is None or saved_size is None:
        return batches
    if state["samples_seen"] % batch_size:
        raise ConfigurationError(
            f"The position is {state['samples_seen']} samples into the epoch (batches of "
            f"{saved_size}); that is no whole number of batches of {batch_size}."
        )
    return int(state["samples_seen"] // batch_size)
