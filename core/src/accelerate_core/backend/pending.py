"""The owner hooks that save and load the gradients of an unfinished accumulation cycle."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch

from accelerate_core.builtin.compiled import match_keys, plain_keys
from accelerate_core.contract.hooks import owner

if TYPE_CHECKING:
    from accelerate_core.contract.view import AcceleratorView


class PendingGradientHooks:
    """The owner hooks for a save or a load in the middle of an accumulation cycle."""

    @owner
    def pending_gradients(
        self,
        accelerator: AcceleratorView,
        model: torch.nn.Module,
        parameters: Collection[torch.Tensor],
    ) -> Mapping[str, torch.Tensor]:
        """Return this rank's gradients that no optimizer has used yet.

        Called once per model if a checkpoint is saved in the middle of an accumulation cycle. It must not
        start a collective. The backend chooses the keys, as only `load_pending_gradients` reads them.

        * `parameters`: those whose optimizer has not stepped since the last backward.

        Default: return the `grad` of each of these parameters, by parameter name.
        """
        wanted = {id(parameter) for parameter in parameters}
        inner = accelerator.unwrap_model(model)
        return {
            name: parameter.grad
            for name, parameter in plain_keys(inner, dict(inner.named_parameters())).items()
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
        """Restore the gradients that `pending_gradients` returned, on a model without gradients.

        With the same number of ranks and the same mesh as when saving, it is called once, with
        `factor=None`. Otherwise it is called on every rank with the gradients of each saving rank in
        order. Add them up, multiplied by `factor`; this keeps the mean over the ranks the same.

        Default: add each value to the `grad` of the parameter with that name.
        """
        inner = accelerator.unwrap_model(model)
        parameters = dict(inner.named_parameters(remove_duplicate=False))
        for name, gradient in match_keys(gradients, parameters, inner).items():
            parameter = parameters[name]
            value = gradient.to(parameter.device)
            if factor is not None:
                value = value * factor
            if parameter.grad is None:
                parameter.grad = value
            else:
                parameter.grad += value
