"""The owner hooks of a training step, from autocast to clearing the gradients, with defaults."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch.optim import Optimizer

from accelerate_core.contract.hooks import owner
from accelerate_core.contract.schedule import ScheduleResult, ScheduleStep
from accelerate_core.errors import ConfigurationError

if TYPE_CHECKING:
    from accelerate_core.config.handlers import AutocastKwargs
    from accelerate_core.contract.members import GradientReducer
    from accelerate_core.contract.trainable import TrainableChange
    from accelerate_core.contract.view import AcceleratorView


class StepHooks:
    """The owner hooks that are called in every step."""

    name: ClassVar[str]
    reduces_gradients: ClassVar[Literal["backward", "step", "engine", "never"]]
    owns: ClassVar[frozenset[str]] = frozenset()

    @owner
    def autocast(
        self,
        accelerator: AcceleratorView,
        model: torch.nn.Module | None,
        settings: AutocastKwargs | None,
    ) -> AbstractContextManager[object]:
        """Return the mixed precision context.

        * `model`: the prepared model whose forward is about to run; None if the script calls
          `accelerator.autocast()` itself.
        * `settings`: the options, or None for the defaults.

        Default: enter the precision's autocast.
        """
        options: dict[str, Any] = {}
        if settings is not None:
            options = {"enabled": settings.enabled, "cache_enabled": settings.cache_enabled}
        return accelerator.precision.autocast(accelerator, model, options)

    @owner
    def scale_loss(self, accelerator: AcceleratorView, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, multiplied by the loss scale. It is already divided for accumulation.

        Default: use the gradient scaler, if the precision has one.
        """
        scaler = accelerator.scaler
        return loss if scaler is None else scaler.scale(loss)

    @owner
    def backward(
        self, accelerator: AcceleratorView, loss: torch.Tensor, kwargs: dict[str, Any]
    ) -> None:
        """Run backward on a loss that is already divided by the accumulation steps and scaled.

        Default: call `loss.backward(**kwargs)`.
        """
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    @owner
    def use_reducer(
        self, accelerator: AcceleratorView, model: torch.nn.Module, reducer: GradientReducer
    ) -> None:
        """Let a plugin's reducer average the gradients of a model that `prepare_model` returned.

        Default: raise an error.
        """
        raise ConfigurationError(
            f"The backend {self.name!r} does not let another plugin average its gradients. Choose a "
            "backend that implements use_reducer, or disable the plugin that implements "
            "reduce_gradients (ACCELERATE_DISABLED_PLUGINS=NAME)."
        )

    @owner
    def follow_trainable(
        self,
        accelerator: AcceleratorView,
        change: TrainableChange,
        loss: torch.Tensor | None,
    ) -> bool:
        """Adapt to parameters that were frozen, unfrozen or added since `prepare` or the last such call.

        Called before a backward that synchronises gradients, on the ranks that see a change. Return
        whether the backend has adapted; if not, it is asked again before the next one. If the gradients
        of `change.unfrozen` would not be combined, raise a `ConfigurationError` that names them.

        * `change`: the prepared model, and the parameters by name.
        * `loss`: the loss of the backward that follows; None if the backend runs forward as well.

        Default: return False. Raise an error for unfrozen and added parameters if the backend has an
        engine or an optimizer of its own, or combines gradients in `backward` on several ranks.
        """
        has_engine = self.reduces_gradients == "engine" or "optimizer" in self.owns
        in_backward = self.reduces_gradients == "backward" and accelerator.num_processes > 1
        if change.unfrozen and (has_engine or in_backward):
            raise ConfigurationError(
                f"Backend {self.name!r} only trains parameters that required gradients in prepare(), but "
                f"some of {type(change.model).__name__} changed afterwards ({change}). Let all parameters "
                "that will be trained require gradients when you call prepare(), and freeze them "
                "afterwards, or choose another backend."
            )
        return False

    @owner
    def scale_gradients(
        self, accelerator: AcceleratorView, models: Sequence[torch.nn.Module], factor: torch.Tensor
    ) -> None:
        """Multiply the gradients of the models by a 0-d tensor.

        Called once per accumulation cycle that counts items, after the backward that synchronises
        gradients. `factor` assumes that gradients are the mean over the ranks of the loss scope. A backend
        that sums them must also divide by the number of these ranks.

        Default: multiply the gradients in place, with one call for each device and dtype.
        """
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for parameter in dict.fromkeys(p for model in models for p in model.parameters()):
            if parameter.grad is not None:
                grad = parameter.grad
                groups[grad.device, grad.dtype].append(grad)
        for (device, dtype), grads in groups.items():
            # Keep at least fp32, because a rounded factor would change every gradient by the same error.
            by = factor.to(device, torch.promote_types(dtype, torch.float32))
            dense = [grad for grad in grads if not grad.is_sparse]
            if dense:
                torch._foreach_mul_(dense, by)
            for grad in grads:
                if grad.is_sparse:
                    grad.mul_(by)

    @owner
    def no_sync(
        self, accelerator: AcceleratorView, model: torch.nn.Module
    ) -> AbstractContextManager[object]:
        """Return a context in which backward doesn't reduce gradients between ranks.

        Default: a context that does nothing.
        """
        return nullcontext()

    @owner
    def trigger_sync_in_backward(
        self, accelerator: AcceleratorView, model: torch.nn.Module
    ) -> AbstractContextManager[object]:
        """Return a context in which the next backward reduces gradients, although forward ran in `no_sync`.

        Default: a context that does nothing.
        """
        return nullcontext()

    @owner
    def unscale_gradients(self, accelerator: AcceleratorView, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the loss scale; called once per step.

        Default: use the gradient scaler, if the precision has one.
        """
        if accelerator.scaler is not None:
            accelerator.scaler.unscale_(optimizer)

    @owner
    def clip_grad(
        self,
        accelerator: AcceleratorView,
        parameters: Sequence[torch.Tensor],
        max_norm: float | None,
        norm_type: float,
        clip_value: float | None,
    ) -> torch.Tensor | None:
        """Clip gradients by their global norm, or element by element.

        Exactly one of `max_norm` and `clip_value` is given. With `max_norm`, return the norm before
        clipping as a 0-d tensor. With `clip_value`, clip every element to [-clip_value, clip_value] and
        return None.

        Default: call the precision's `clip_grad`, which uses torch.
        """
        return accelerator.precision.clip_grad(parameters, max_norm, norm_type, clip_value)

    @owner
    def optimizer_step(
        self, accelerator: AcceleratorView, optimizer: Optimizer, closure: Callable[[], Any] | None
    ) -> bool:
        """Step the optimizer. Return False if the step was skipped because a gradient overflowed.

        Default: step, using the gradient scaler if the precision has one.
        """
        scaler = accelerator.scaler
        if scaler is None:
            if closure is None:
                optimizer.step()
            else:
                optimizer.step(closure)
            return True
        if closure is not None:
            raise ConfigurationError("A closure cannot be used with a gradient scaler (fp16).")
        taken = _step_through(scaler, optimizer)
        overflowed = False
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            # A fused optimizer is always called, and skips the step itself.
            overflowed = any(
                bool(found.item()) for found in scaler._found_inf_per_device(optimizer).values()
            )
        return taken and not overflowed

    @owner
    def zero_grad(
        self, accelerator: AcceleratorView, optimizer: Optimizer, set_to_none: bool
    ) -> None:
        """Clear the gradients of the optimizer's parameters.

        Default: call `optimizer.zero_grad`.
        """
        optimizer.zero_grad(set_to_none=set_to_none)

    @owner
    def context_parallel(
        self,
        accelerator: AcceleratorView,
        buffers: Sequence[torch.Tensor] | None,
        buffer_seq_dims: Sequence[int] | None,
        no_restore_buffers: set[torch.Tensor] | None,
    ) -> AbstractContextManager[object]:
        """Return a context in which buffers are sharded along their sequence dimension.

        Default: a context that does nothing.
        """
        return nullcontext()

    @owner
    def run_schedule(
        self, accelerator: AcceleratorView, model: torch.nn.Module, batch: Any, step: ScheduleStep
    ) -> ScheduleResult:
        """Run the forward pass of one batch, and in training the backward pass, in one call.

        For engines that can't separate them, such as pipelines. A call counts as one backward and may be
        inside `accumulate`. The script still clips gradients and steps the optimizer. Return the same loss
        on every rank.

        * `step`: whether to train, whether this backward synchronises, and how to divide the loss.

        Default: raise an error, because scripts run forward and backward themselves.
        """
        raise ConfigurationError(
            f"train_step() is for backends that run forward and backward in one call; with {self.name!r}, "
            "call the model, accelerator.backward(loss) and optimizer.step()."
        )


def _step_through(scaler: torch.amp.GradScaler, optimizer: Any) -> bool:
    """Call `GradScaler.step`, and return whether it stepped the optimizer, which it does not report.

    torch calls an optimizer's post hook after each step that was not skipped.
    """
    if not getattr(type(optimizer).step, "hooked", False):
        return _step_through_unhooked(scaler, optimizer)
    taken: list[None] | None = vars(optimizer).get("_accelerate_taken")
    if taken is None:
        taken = []
        optimizer._accelerate_taken = taken
        optimizer.register_step_post_hook(lambda *_: taken.append(None))
    taken.clear()
    scaler.step(optimizer)
    return bool(taken)


def _step_through_unhooked(scaler: torch.amp.GradScaler, optimizer: Any) -> bool:
    """Do the same for an optimizer without hooks, which does not derive from torch's class."""
    taken: list[None] = []
    step, patched = optimizer.step, "step" in vars(optimizer)

    @functools.wraps(step)  # the scaler reads its signature
    def counted(*arguments: Any, **more: Any) -> Any:
        taken.append(None)
        return step(*arguments, **more)

    optimizer.step = counted
    try:
        scaler.step(optimizer)
    finally:
        if patched:  # a scheduler had replaced the method
            optimizer.step = step
        else:
            del optimizer.step
    return bool(taken)
