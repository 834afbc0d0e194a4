"""Debug mode: compare the weights of the ranks while they train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate_checkpoint.weight_sums import first_difference, weight_sums
from accelerate_core.plugin import (
    AcceleratorView,
    Claim,
    DistributedOperationException,
    Request,
)

#: The step after which all weights are compared, and the steps between later comparisons.
_FIRST, _EVERY = 2, 10


class CompareParameters:
    """Compares the weights of the ranks that read different data.

    A backend that forgets to reduce gradients, even in some steps only, trains a separate model on
    every rank, and nothing fails. All weights are compared after the second step of each optimizer.
    Every ten steps after that, one part of them is compared, in turn, so that a comparison stays
    cheap. Sharded parameters are left out, because each rank has a different part.
    """

    name = "debug_parameters"
    api_version = (1, 0)

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}

    @classmethod
    def detect(cls, request: Request) -> Claim | None:
        """Claim runs in debug mode."""
        return Claim(0, "debug mode is on") if request.env_flag("ACCELERATE_DEBUG_MODE") else None

    def on_step_end(self, accelerator: AcceleratorView, optimizer: Any) -> None:
        """Compare, if it is time to.

        Raises:
            DistributedOperationException: on every rank, with the first rank and parameter that differ.
        """
        steps = self._steps.get(id(optimizer), 0) + 1
        self._steps[id(optimizer)] = steps
        turn, rest = divmod(steps - _FIRST, _EVERY)
        backend = accelerator.backend
        exact = backend.supports.get("exact", True) and backend.reduces_gradients != "never"
        _, count = accelerator.hooks.data_shard()
        if steps < _FIRST or rest or count == 1 or not exact:
            return
        named = _named_parameters(accelerator, optimizer)
        # The first comparison reads everything.
        mine = weight_sums(named, turn) if turn else weight_sums(named, limit=2**62)
        found = first_difference(accelerator.hooks.gather_object(mine, "data"))
        if found is not None:
            rank, name, number = found
            raise DistributedOperationException(
                f"After {steps} steps, {name!r} and {number - 1} other parameter(s) differ between data "
                f"rank {rank} and data rank 0, so the ranks train different models. Possible causes: the "
                f"backend {backend.name!r} (which declares reduces_gradients="
                f"{backend.reduces_gradients!r}) does not always reduce the gradients, a parameter is "
                "used on some ranks only, or something other than the optimizer changes it."
            )


def _named_parameters(accelerator: AcceleratorView, optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Return the parameters of an optimizer with their names in the models."""
    names = {
        id(parameter): name
        for model in accelerator.models
        for name, parameter in model.named_parameters()
    }
    held = (p for group in optimizer.param_groups for p in group["params"])
    for number, parameter in enumerate(held):
        yield names.get(id(parameter), f"parameter {number}"), parameter
