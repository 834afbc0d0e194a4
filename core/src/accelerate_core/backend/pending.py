"""The owner hooks of gradients that wait for a step, as a checkpoint keeps them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch

from accelerate_core.contract.hooks import owner

if TYPE_CHECKING:
    from accelerate_core.contract.view import AcceleratorView


class PendingGradientHooks:
    """What a backend is asked when a save or a load falls into an accumulation cycle."""

    @owner
    def pending_gradients(
        self,
        accelerator: AcceleratorView,
        model: torch.nn.Module,
        parameters: Collection[torch.Tensor],
    ) -> Mapping[str, torch.Tensor]:
        """Return this rank's gradients that no optimizer has stepped with yet.

        Called by a save in the middle of an accumulation cycle, once per model and without a
        collective between the ranks. `parameters` are those whose optimizer has not stepped since
        the last backward. The names are the backend's own: only `load_pending_gradients` reads them.

        Default: return the `grad` of each of these parameters, by the parameter's name.
        """
        wanted = {id(parameter) for parameter in parameters}
        named = accelerator.unwrap_model(model).named_parameters()
        return {
            name: parameter.grad
            for name, parameter in named
            if parameter.grad is not None and id(parameter) in wanted
        }

    @owner
    def load_pending_gradients(
        self,
        accelerator: AcceleratorView,
        model: torch.nn.Module,
        gradients: Mapping[str, torch.Tensor],
        factor: float | None,
    ) -> None:
        """Put back what `pending_gradients` returned, on a model without gradients.

        Called once, with None, if as many ranks on the same mesh load as saved.
        Otherwise every rank is called with the gradients of each rank that saved, in order, and
        adds them up, each multiplied by `factor`, so that the mean over the ranks stays the same.

        Default: add to the `grad` of each parameter of that name.
        """
        inner = accelerator.unwrap_model(model)
        for name, gradient in gradients.items():
            parameter = inner.get_parameter(name)
            value = gradient.to(parameter.device)
            if factor is not None:
                value = value * factor
            if parameter.grad is None:
                parameter.grad = value
            else:
                parameter.grad += value
