"""Gradient scaling over accumulation cycles and several optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from accelerate_core.contract.members import PreparedOptimizer


@dataclass(eq=False)
class LossScaler:
    """Decides when torch's gradient scaler unscales, steps and updates.

    Gradients stay scaled inside an accumulation cycle. With several optimizers, the scale is updated
    after all of them have stepped, or before the next loss is scaled if that comes first. An update
    between two steps would forget that the second optimizer is already unscaled.

    Args:
        scaler: a `torch.amp.GradScaler`, or an object with its interface.
        _optimizers: the prepared optimizers; the list grows.
        _unscale: the hook that unscales the gradients of one inner optimizer.
    """

    scaler: torch.amp.GradScaler
    _optimizers: Sequence[PreparedOptimizer]
    _unscale: Callable[[Any], None]
    _unscaled: set[int] = field(default_factory=set, init=False)
    #: Ids of the optimizers that stepped since the last update.
    stepped: set[int] = field(default_factory=set, init=False)

    @property
    def enabled(self) -> bool:
        """Whether losses are scaled."""
        return self.scaler.is_enabled()

    def unscale(self, optimizers: Sequence[Any]) -> None:
        """Unscale the gradients of inner optimizers, each once per step."""
        for one in optimizers:
            if id(one) not in self._unscaled and _has_gradients(one):
                self._unscale(one)
                self._unscaled.add(id(one))

    def unscale_owners(self, parameters: Sequence[torch.Tensor]) -> None:
        """Unscale only the optimizers of these parameters, because others may be inside a cycle."""
        if len(self._optimizers) == 1:
            self.unscale([self._optimizers[0].optimizer])
            return
        wanted = {id(parameter) for parameter in parameters}
        owners = []
        for one in self._optimizers:
            if _holds_any(one.optimizer, wanted):
                owners.append(one.optimizer)
        self.unscale(owners)

    def note_step(self, optimizer: Any) -> None:
        """Record that the scaler stepped an inner optimizer."""
        self._unscaled.discard(id(optimizer))
        self.stepped.add(id(optimizer))
        if len(self.stepped) >= len(self._optimizers):
            self.update_scale()

    def update_scale(self) -> None:
        """Update the scale if an optimizer has stepped since the last update.

        `GradScaler.update` forgets which optimizers are unscaled, and would unscale those that have
        not stepped yet a second time. So their state is restored after the update.
        """
        if not self.stepped:
            return
        if not self._unscaled:
            self.scaler.update()
            self.stepped.clear()
            return
        waiting = {
            id(one.optimizer)
            for one in self._optimizers
            if id(one.optimizer) in self._unscaled and _has_gradients(one.optimizer)
        }
        states = self.scaler._per_optimizer_states
        kept = {key: states[key] for key in waiting}
        self.scaler.update()
        self.scaler._per_optimizer_states.update(kept)
        self.stepped.clear()
        self._unscaled &= waiting

    def scale(self) -> float:
        """Read the scale from the device."""
        return float(self.scaler.get_scale())


# Plain loops, because a generator costs a call per parameter in every step.
def _has_gradients(optimizer: Any) -> bool:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return True
    return False


def _holds_any(optimizer: Any, parameter_ids: set[int]) -> bool:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in parameter_ids:
                return True
    return False
