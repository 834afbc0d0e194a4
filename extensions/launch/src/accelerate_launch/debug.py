"""Debug mode's check that all ranks train the same model."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from accelerate_core import AcceleratorView, Claim, Request
from accelerate_core.errors import DistributedOperationException

_STEPS = 2


class CompareParameters:
    """Compares an optimizer's parameters between the data-parallel ranks, once, after two steps.

    If a backend does not reduce gradients, each rank silently trains a different model. Sharded
    parameters are not compared, because each rank holds a different part of them.
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
        """Compare after the second step of each optimizer.

        Raises:
            DistributedOperationException: a parameter differs; raised on every rank.
        """
        steps = self._steps.get(id(optimizer), 0) + 1
        self._steps[id(optimizer)] = steps
        backend = accelerator.backend
        exact = backend.supports.get("exact", True) and backend.reduces_gradients != "never"
        _, count = accelerator.hooks.data_shard()
        if steps != _STEPS or count == 1 or not exact:
            return
        mine = _checksums(accelerator, optimizer)
        ranks = accelerator.hooks.gather_object(mine, "data")
        for rank, theirs in enumerate(ranks):
            differing = [name for name in ranks[0] if theirs.get(name) != ranks[0][name]]
            if differing:
                raise DistributedOperationException(
                    f"After {_STEPS} steps, {differing[0]!r} and {len(differing) - 1} other "
                    f"parameter(s) differ between data rank {rank} and data rank 0, so the ranks "
                    f"train different models. Possible causes: the backend {backend.name!r} (which "
                    f"declares reduces_gradients={backend.reduces_gradients!r}) does not reduce the "
                    "gradients, a parameter is used on some ranks only, or something other than the "
                    "optimizer changes it."
                )


def _checksums(accelerator: AcceleratorView, optimizer: Any) -> dict[str, tuple[float, float]]:
    """Return, by name, the sum and norm of each unsharded parameter of an optimizer."""
    names = {
        id(parameter): name
        for model in accelerator.models
        for name, parameter in model.named_parameters()
    }
    whole = {
        names.get(id(parameter), f"parameter {number}"): parameter.detach().double()
        for number, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"])
        if not isinstance(parameter, DTensor)
    }
    return {name: (value.sum().item(), value.norm().item()) for name, value in whole.items()}
