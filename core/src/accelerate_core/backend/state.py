"""The owner hooks of state, with their defaults: what a checkpoint keeps of a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from accelerate_core.errors import listing
from accelerate_core.hookspecs import owner

if TYPE_CHECKING:
    from accelerate_core.contract.view import AcceleratorView


class StateHooks:
    """What a backend is asked when state is saved and loaded."""

    name: ClassVar[str]

    @owner
    def model_state(self, accelerator: AcceleratorView, model: torch.nn.Module) -> dict[str, Any]:
        """Return the state dict `save_state` keeps; keys as the user's own model has them.

        Default: return the unwrapped model's state dict.
        """
        return dict(accelerator.unwrap_model(model).state_dict())

    @owner
    def load_model_state(
        self,
        accelerator: AcceleratorView,
        model: torch.nn.Module,
        state: Mapping[str, Any],
        strict: bool,
    ) -> None:
        """Load what `model_state` gave.

        Default: load into the unwrapped model.
        """
        accelerator.unwrap_model(model).load_state_dict(state, strict=strict)

    @owner
    def optimizer_state(self, accelerator: AcceleratorView, optimizer: Any) -> dict[str, Any]:
        """Return the state dict of one inner optimizer.

        Default: return the optimizer's state dict.
        """
        return dict(optimizer.state_dict())

    @owner
    def load_optimizer_state(
        self, accelerator: AcceleratorView, optimizer: Any, state: Mapping[str, Any]
    ) -> None:
        """Load what `optimizer_state` gave.

        Default: load into the optimizer.
        """
        optimizer.load_state_dict(state)

    @owner
    def rng_state(self, accelerator: AcceleratorView) -> Mapping[str, Any]:
        """Return the state of this rank's generators that torch does not know, for a checkpoint.

        Default: there are none.
        """
        return {}

    @owner
    def load_rng_state(self, accelerator: AcceleratorView, state: Mapping[str, Any]) -> None:
        """Set the generators of `rng_state`, after all else of a checkpoint is loaded.

        Default: there are none.
        """

    @owner
    def on_seed(self, accelerator: AcceleratorView, seed: int) -> None:
        """Seed the generators of `rng_state`; `set_seed` was called, with this rank's seed.

        Default: there are none.
        """

    @owner
    def save_state(
        self, accelerator: AcceleratorView, directory: Path, options: Mapping[str, Any], later: bool
    ) -> Callable[[], None] | None:
        """Write what the backend keeps beside the core's files; called on every rank, in order.

        `directory` is the backend's own inside the checkpoint and does not exist yet; `options`
        are the further arguments of `save_state`. Write now and return None; or, where `later`
        says that training goes on meanwhile, copy now and return a function that writes, which
        must not use the default group. Declare `owns={"checkpoint"}` to keep models and
        optimizers here alone.

        Default: write nothing: the core keeps models and optimizers.
        """
        if options:
            accelerator.note_once(
                f"The backend {self.name!r} has no use for {listing(options)} of save_state."
            )
        return None

    @owner
    def load_state(
        self, accelerator: AcceleratorView, directory: Path, options: Mapping[str, Any]
    ) -> None:
        """Read what `save_state` wrote; the directory exists if something was written.

        Default: read nothing.
        """

    @owner
    def consolidate(self, accelerator: AcceleratorView, model: torch.nn.Module) -> dict[str, Any]:
        """Return the whole, unsharded state dict; ranks other than the main one may get {}.

        Default: return the unwrapped model's state dict: it is whole on every rank.
        """
        return dict(accelerator.unwrap_model(model).state_dict())
