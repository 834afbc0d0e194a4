"""Steps that a replica takes alone between two averages: local SGD and DiLoCo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from accelerate_torchft.replica import Replica
from accelerate_torchft.settings import TorchFTKwargs
from accelerate_torchft.state import local


class LocalSteps:
    """Counts local steps, and combines the replicas' parameters every `sync_every` steps.

    The parameters after the last combination are kept. If a replica is lost meanwhile, all of them
    return to these parameters.
    """

    def __init__(self, settings: TorchFTKwargs) -> None:
        self._settings = settings
        self._taken = 0
        self._kept: list[torch.nn.Parameter] = []
        self._outer: torch.optim.SGD | None = None

    def keep(self, models: Sequence[torch.nn.Module]) -> None:
        """Keep the current parameters; called when a quorum has formed."""
        live = self._live(models)
        if not self._kept:
            self._kept = [torch.nn.Parameter(one.clone()) for one in live]
            options = self._settings
            if options.mode == "diloco":
                momentum = options.outer_momentum
                self._outer = torch.optim.SGD(
                    self._kept, options.outer_lr, momentum=momentum, nesterov=momentum > 0
                )
        self._copy(live, self._kept)
        self._taken = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the outer optimizer."""
        return {} if self._outer is None else self._outer.state_dict()

    def load_state_dict(self, state: dict[str, Any], models: Sequence[torch.nn.Module]) -> None:
        """Load the state of the outer optimizer."""
        self.keep(models)
        if self._outer is not None and state:  # empty before the first quorum
            self._outer.load_state_dict(state)

    def stepped(self, replica: Replica, models: Sequence[torch.nn.Module], last: bool) -> bool:
        """Count a local step, and combine the replicas if it is time.

        Args:
            last: combine now, because the epoch ends.

        Returns:
            False if a replica was lost, so that the local steps were undone.
        """
        self._taken += 1
        if self._taken < self._settings.sync_every and not last:
            return True
        self._taken = 0
        live = self._live(models)
        if self._outer is None:
            combined = [one.clone() for one in live]
            replica.average(combined)
            committed = replica.vote()
            self._copy(combined if committed else self._kept, live)
            return committed
        moved = [kept.detach() - one for kept, one in zip(self._kept, live, strict=True)]
        replica.average(moved)
        committed = replica.vote()
        if committed:
            for kept, delta in zip(self._kept, moved, strict=True):
                kept.grad = delta
            self._outer.step()
            self._outer.zero_grad()
        self._copy(self._kept, live)
        return committed

    def _live(self, models: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
        trained = dict.fromkeys(p for model in models for p in model.parameters())
        return [local(one.detach()) for one in trained if one.requires_grad]

    @torch.no_grad()
    def _copy(self, source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> None:
        for one, to in zip(source, target, strict=True):
            to.copy_(one)
