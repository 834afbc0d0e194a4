"""The position of a loader in its epoch, and how to return to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from accelerate_core.data.shared_draws import GlobalStates, SharedDraws
from accelerate_core.errors import ConfigurationError

VERSION = 1


@dataclass
class OrderState:
    """The states, before an epoch began, of the generators that its order is drawn from."""

    torch_rng: torch.Tensor
    generator: torch.Tensor | None = None
    #: The states of the other generators that a custom sampler may draw from.
    draws: str | None = None

    @classmethod
    def capture(cls, generator: torch.Generator | None, draws: SharedDraws | None) -> OrderState:
        """Copy the current states."""
        return cls(
            torch.get_rng_state(),
            None if generator is None else generator.get_state(),
            None if draws is None else draws.state(),
        )

    @contextmanager
    def replayed(
        self, generator: torch.Generator | None, draws: SharedDraws | None
    ) -> Iterator[None]:
        """Draw from these states inside the block, then restore the global generators.

        The user's own generators are not restored: after the draws they are in the state that they
        had in the run that is resumed.
        """
        before = GlobalStates.capture()
        torch.set_rng_state(self.torch_rng)
        if draws is not None and self.draws is not None:
            draws.load_state(self.draws)
        if generator is not None and self.generator is not None:
            generator.set_state(self.generator)
        try:
            yield
        finally:
            before.restore()


@dataclass
class Position:
    """The progress of one loader; loaders returned by `skip_first_batches` share it.

    Attributes:
        batches: batches of the single-process loader, so the count is valid for any number of ranks.
        ended: whether the last batch of the epoch was returned.
        order: the generators of the epoch's order; None before they are known.
        loader_state: the dataset's own state.
        kept_workers: whether worker processes of an earlier epoch read this one.
        owner: the iteration that moves the position. If it is None, the next iteration begins here;
            otherwise it restarts the epoch.
    """

    epoch: int = 0
    epoch_was_set: bool = False
    batches: int = 0
    ended: bool = False
    order: OrderState | None = None
    loader_state: Any = None
    kept_workers: bool = False
    owner: object = field(default=None, repr=False)

    def start_of(self, epoch: int) -> None:
        """Move to the first batch of an epoch."""
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

        Args:
            batch_size: the batch size of the loader.
            per_step: batches per global step.
            has_workers: whether the next epoch will reuse existing worker processes.
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
        """Load a position; the next iteration begins there.

        Raises:
            ConfigurationError: the state is not a position, or its number of samples is not
                divisible by this batch size.
        """
        batches = _batches_of(state, batch_size)
        self.start_of(int(state["epoch"]))
        self.epoch_was_set = bool(state.get("epoch_was_set", False))
        self.batches = batches
        self.ended = bool(state.get("ended", False))
        self.loader_state = state.get("loader")
        self.kept_workers = bool(state.get("has_workers", False))
        if "torch_rng" in state:
            self.order = OrderState(state["torch_rng"], state.get("generator"), state.get("draws"))

    def is_at(self, state: dict[str, Any], batch_size: int | None) -> bool:
        """Whether a state describes this position in the same order."""
        return (
            self.order is not None
            and "torch_rng" in state
            and (self.batches, self.epoch) == (_batches_of(state, batch_size), state["epoch"])
            and torch.equal(self.order.torch_rng, state["torch_rng"])
        )


def _batches_of(state: dict[str, Any], batch_size: int | None) -> int:
    """Return the position of a state in its epoch, in batches of this size."""
    if state.get("version") != VERSION or "epoch" not in state:
        raise ConfigurationError(
            f"The state is not the position of a prepared loader (version {VERSION}); it has the "
            f"keys {sorted(map(str, state))}. Pass what the loader's state_dict() returned."
        )
    batches = int(state["global_batches"])
    saved_size = state.get("batch_size")
    if not batches or batch_size == saved_size or batch_size is None or saved_size is None:
        return batches
    if state["samples_seen"] % batch_size:
        raise ConfigurationError(
            f"The position, {state['samples_seen']} samples into the epoch, is not divisible by "
            f"batch_size={batch_size}. Use one that divides it, such as the saved {saved_size}."
        )
    return int(state["samples_seen"] // batch_size)
