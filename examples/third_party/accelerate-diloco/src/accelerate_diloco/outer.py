"""The outer optimizer that belongs to one inner optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from accelerate_diloco.settings import DiLoCoSettings

#: Replaces a flat tensor by its mean over the ranks.
Mean = Callable[[torch.Tensor], torch.Tensor]


class Outer:
    """Holds `theta`, the parameters after the last outer step, and a momentum of the same shapes.

    Every `sync_every` inner steps, SGD with momentum updates `theta`. Its gradient is `theta` minus
    the mean of the parameters over all ranks. All ranks then continue from the new `theta`.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], settings: DiLoCoSettings) -> None:
        self.parameters = list(parameters)
        self.settings = settings
        self.theta = [parameter.detach().clone() for parameter in self.parameters]
        self.momentum = [torch.zeros_like(parameter) for parameter in self.theta]
        self.steps = self.outer_steps = 0

    def extend(self, parameters: Sequence[torch.Tensor]) -> None:
        """Add parameters that were added to the inner optimizer later, with their current values."""
        known = {id(parameter) for parameter in self.parameters}
        for parameter in parameters:
            if id(parameter) not in known:
                self.parameters.append(parameter)
                self.theta.append(parameter.detach().clone())
                self.momentum.append(torch.zeros_like(self.theta[-1]))

    @torch.no_grad()
    def after_inner_step(self, mean: Mean) -> None:
        """Count an inner step, and take the outer step if it is due."""
        self.steps += 1
        if self.steps % self.settings.sync_every == 0:
            self.average(mean)
            self.outer_steps += 1

    @torch.no_grad()
    def average(self, mean: Mean) -> None:
        """Take the outer step, with one reduction per dtype."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, parameter in enumerate(self.parameters):
            by_dtype.setdefault(parameter.dtype, []).append(index)
        for indices in by_dtype.values():
            changes = [(self.theta[i] - self.parameters[i]).reshape(-1) for i in indices]
            flat = mean(torch.cat(changes))
            parts = torch.split(flat, [change.numel() for change in changes])
            for index, part in zip(indices, parts, strict=True):
                self._step(index, part.view_as(self.theta[index]))

    def _step(self, index: int, gradient: torch.Tensor) -> None:
        settings, theta = self.settings, self.theta[index]
        momentum = self.momentum[index].mul_(settings.outer_momentum).add_(gradient)
        change = gradient.add(momentum, alpha=settings.outer_momentum)
        theta.sub_((change if settings.nesterov else momentum) * settings.outer_lr)
        self.parameters[index].copy_(theta)

    def state(self) -> dict[str, Any]:
        """Return the state, which is the same on all ranks."""
        return {
            "steps": self.steps,
            "outer_steps": self.outer_steps,
            "theta": self.theta,
            "momentum": self.momentum,
        }

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Restore a result of `state`."""
        self.steps = int(state["steps"])
        self.outer_steps = int(state["outer_steps"])
        for own, given in ((self.theta, state["theta"]), (self.momentum, state["momentum"])):
            for tensor, value in zip(own, given, strict=True):
                tensor.copy_(value)
