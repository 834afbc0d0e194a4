"""One training step: accumulation, backward, clipping and mixed precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from accelerate_core.config.handlers import AutocastKwargs
from accelerate_core.contract.hooks import wrong_answer
from accelerate_core.contract.members import BackendView, CommunicatorView
from accelerate_core.contract.schedule import ScheduleResult, ScheduleStep
from accelerate_core.errors import ConfigurationError, warn
from accelerate_core.plugins.manager import SharedHooks
from accelerate_core.training.gradient_state import GradientState
from accelerate_core.training.loss_scaler import LossScaler
from accelerate_core.training.optimizer import AcceleratedOptimizer
from accelerate_core.training.token_count import TokenCount
from accelerate_core.training.trainable import (
    TrainableRecord,
    foreign_parameters,
    refuse_half_weights,
    requires_grad,
)

if TYPE_CHECKING:
    from accelerate_core.contract.owner_hooks import OwnerHooks


@dataclass(eq=False, kw_only=True)
class TrainingLoop:
    """One training step: accumulation, backward, clipping and mixed precision.

    Args:
        hooks: the hooks of the active backend.
        shared_hooks: the hooks that every active plugin may implement.
        backend: declares what it does itself (`owns`).
        state: the position in the accumulation cycle.
        comm: the communicator of the ranks over which a loss is summed.
        distributed: whether ranks share gradients.
        defers_sync: whether there is something to skip in a backward under the backend's `no_sync`.
        models: the prepared models; the list grows.
        optimizers: the prepared optimizers; the list grows.
        trainable: which parameters of the models are trained; the list grows.
        scaler: scales losses; None if they are not scaled.
        replaced: parameters that `prepare` replaced -> (prepared model, name).
    """

    hooks: OwnerHooks
    shared_hooks: SharedHooks
    backend: BackendView
    state: GradientState
    comm: CommunicatorView
    distributed: bool
    defers_sync: bool
    models: Sequence[torch.nn.Module]
    optimizers: Sequence[AcceleratedOptimizer]
    trainable: Sequence[TrainableRecord]
    scaler: LossScaler | None
    replaced: Mapping[torch.Tensor, tuple[Any, str]]
    #: Micro-batches seen in the current accumulation cycle.
    step: int = field(default=0, init=False)
    #: Whether `on_first_micro_batch` was called.
    watched: bool = field(default=False, init=False)
    _clipped: bool = field(default=False, init=False)
    #: The number of parameters in the optimizers when they were last compared with the models.
    _held: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        backend = self.backend
        # An engine's own optimizer holds other tensors than the model.
        self._counted_optimizers = () if "optimizer" in backend.owns else self.optimizers
        self._divides_loss = "accumulation" not in backend.owns
        refusal = None
        if not (self._divides_loss or backend.supports.get("num_items", False)):
            refusal = (
                f"Backend {backend.name!r} accumulates gradients itself and cannot count items. "
                "Remove num_items, and make each loss a mean."
            )
        self.tokens = TokenCount(self.comm, self.hooks.scale_gradients, refusal)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        if value < 1:
            raise ConfigurationError(
                f"gradient_accumulation_steps must be at least 1, not {value}."
            )
        self.state.num_steps = value

    def no_sync(self, model: torch.nn.Module | None = None) -> AbstractContextManager[Any]:
        """Return a context in which backward does not synchronise gradients."""
        return self.unsynced([model] if model is not None else self.models)

    def unsynced(self, models: Sequence[torch.nn.Module]) -> AbstractContextManager[Any]:
        """Return the combined `no_sync` context of several models."""
        if not self.distributed:
            return nullcontext()
        if len(models) == 1:
            return self.hooks.no_sync(models[0])
        stack = ExitStack()
        for model in models:
            stack.enter_context(self.hooks.no_sync(model))
        return stack

    def trigger_sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward synchronises even if forward ran under `no_sync`."""
        if not self.distributed:
            return nullcontext()
        return self.hooks.trigger_sync_in_backward(model)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Divide the loss by the accumulation steps, scale it, and run backward."""
        learning_rate = kwargs.pop("learning_rate", None) if kwargs else None
        if learning_rate is not None and self._fused_optimizers():
            self.lomo_backward(self._divided(loss), learning_rate)
            return
        tokens, state = self.tokens, self.state
        if state.backwards < 2:
            self.shared_hooks.call_each("on_early_backward", loss=loss)
        # `TrainableRecord.differs`, `_divided` and others are inlined, because this runs in every step.
        grown = False
        if self.trainable:
            held = 0
            for optimizer in self._counted_optimizers:
                for group in optimizer.optimizer.param_groups:
                    held += len(group["params"])
            changed = grown = held != self._held
            for record in self.trainable:
                changed |= list(map(requires_grad, record.parameters)) != record.seen
            if changed:
                self._held = held
                self._follow_trainable(loss)
        if tokens.open:
            loss = tokens.divided(loss)
        elif self._divides_loss and state.num_steps > 1:
            loss = loss / state.num_steps
        if self.scaler is not None:
            if self.scaler.stepped:
                self.scaler.update_scale()
            loss = self.hooks.scale_loss(loss)
        try:
            self.hooks.backward(loss, kwargs)
        except Exception:
            _check_loss(loss, kwargs)
            raise
        state.backwards += 1
        if grown and self.distributed:
            self._warn_about_foreign_parameters()
        if tokens.open:
            tokens.apply()

    def _follow_trainable(self, loss: torch.Tensor | None) -> None:
        """Let the backend adapt to parameters that were frozen, unfrozen or added after `prepare`."""
        for record in self.trainable:
            if not self.state.sync_gradients:
                record.note()
                continue
            change = record.change()
            if change is None:
                continue
            if self.scaler is not None and self.scaler.enabled:
                names = {id(parameter): name for name, parameter in change.unfrozen.items()}
                for optimizer in self.optimizers:
                    refuse_half_weights(optimizer.optimizer, names)
            if self.hooks.follow_trainable(change, loss):
                record.accept()

    def _warn_about_foreign_parameters(self) -> None:
        for optimizer in self._counted_optimizers:
            foreign = foreign_parameters(optimizer.optimizer, self.trainable)
            if foreign:
                shapes = ", ".join(str(tuple(parameter.shape)) for parameter in foreign[:3])
                warn(
                    f"{len(foreign)} parameter(s) of {type(optimizer.optimizer).__name__} have gradients "
                    f"but belong to no prepared model (shapes: {shapes}), so each rank trains its own "
                    "copy of them. Pass the module that holds them to prepare(), or make them part of a "
                    "prepared model."
                )

    def _divided(self, loss: torch.Tensor) -> torch.Tensor:
        if self.tokens.open:
            return self.tokens.divided(loss)
        if self._divides_loss and self.state.num_steps > 1:
            return loss / self.state.num_steps
        return loss

    def _fused_optimizers(self) -> list[Any]:
        return [o.optimizer for o in self.optimizers if hasattr(o.optimizer, "fused_backward")]

    @property
    def has_lomo_optimizer(self) -> bool:
        """Whether an optimizer steps inside backward."""
        return bool(self._fused_optimizers())

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Run backward of optimizers that step inside it (LOMO's `fused_backward`)."""
        fused = self._fused_optimizers()
        if not fused:
            raise ConfigurationError(
                "No prepared optimizer has a fused_backward method, as Lomo and AdaLomo have."
            )
        for optimizer in fused:
            optimizer.fused_backward(loss, learning_rate)

    def autocast(self, handler: AutocastKwargs | None) -> AbstractContextManager[Any]:
        """Return the autocast context; it has no effect without mixed precision."""
        return self.hooks.autocast(None, handler)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale gradients, once per step; this has no effect without a scaler."""
        if self.scaler is None:
            return
        chosen = self.optimizers if optimizer is None else optimizer
        several = chosen if isinstance(chosen, list | tuple) else [chosen]
        inner = [one.optimizer if isinstance(one, AcceleratedOptimizer) else one for one in several]
        self.scaler.unscale(inner)

    def update_scale(self) -> None:
        """Apply a pending update of the scale, before state is read."""
        if self.scaler is not None:
            self.scaler.update_scale()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the norm of all gradients taken together."""
        tensors, scale = self._clippable(parameters)
        try:
            largest = max_norm * scale
        except TypeError:
            raise _no_number("clip_grad_norm_", "max_norm", max_norm) from None
        norm = self.hooks.clip_grad(tensors, largest, norm_type, None)
        return norm if norm is None or scale == 1.0 else norm / scale

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip every gradient element to [-clip_value, clip_value]."""
        tensors, scale = self._clippable(parameters)
        try:
            largest = clip_value * scale
        except TypeError:
            raise _no_number("clip_grad_value_", "clip_value", clip_value) from None
        self.hooks.clip_grad(tensors, None, 2.0, largest)

    def _clippable(self, parameters: Any) -> tuple[list[torch.Tensor], float]:
        """Return the parameters, and the scale of their gradients.

        Gradients stay scaled inside a cycle; only then is the scale read from the device.
        """
        single = isinstance(parameters, torch.Tensor)
        if isinstance(parameters, torch.nn.Module):
            raise ConfigurationError(
                f"Gradient clipping takes parameters, not a module ({type(parameters).__name__}). "
                "Pass model.parameters()."
            )
        tensors = [parameters] if single else list(parameters)
        if not self._clipped:
            self._clipped = True
            _refuse_replaced(tensors, self.replaced)
        if self.scaler is None:
            return tensors, 1.0
        if not self.state.sync_gradients:
            return tensors, self.scaler.scale()
        self.scaler.unscale_owners(tensors)
        return tensors, 1.0

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of a prepared optimizer was skipped because of an overflow."""
        return any(optimizer.step_was_skipped for optimizer in self.optimizers)

    def train_step(self, batch: Any, model: torch.nn.Module | None = None) -> ScheduleResult:
        """Run forward and backward of one batch, on a backend that runs both itself."""
        self.update_scale()
        if any(record.differs for record in self.trainable):
            self._follow_trainable(None)
        result = self._run_schedule(model, batch, training=True)
        self.state.backwards += 1
        if self.tokens.open:
            self.tokens.apply()
        return result

    def eval_step(self, batch: Any, model: torch.nn.Module | None = None) -> ScheduleResult:
        """Run forward of one batch, on a backend that runs it itself."""
        return self._run_schedule(model, batch, training=False)

    def _run_schedule(
        self, model: torch.nn.Module | None, batch: Any, *, training: bool
    ) -> ScheduleResult:
        if model is None and len(self.models) != 1:
            raise ConfigurationError(
                f"{len(self.models)} models are prepared. Pass the one to run: "
                "train_step(batch, model)."
            )

        def divide(loss: torch.Tensor) -> torch.Tensor:
            return self.hooks.scale_loss(self._divided(loss))

        step = ScheduleStep(training, self.state.sync_gradients, divide, self.tokens.open)
        chosen = self.models[0] if model is None else model
        result = self.hooks.run_schedule(chosen, batch, step)
        if not isinstance(result, ScheduleResult) or getattr(result.loss, "ndim", None) != 0:
            wanted = "a ScheduleResult with a 0-d loss"
            raise wrong_answer("run_schedule", self.backend.name, result, wanted)
        return result

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[Any]:
        """Return a context in which buffers are sharded along the sequence, if the mesh can."""
        return self.hooks.context_parallel(buffers, buffer_seq_dims, no_restore_buffers)


def _no_number(method: str, argument: str, value: object) -> ConfigurationError:
    return ConfigurationError(f"{method}({argument}={value!r}): {argument} must be a number.")


def _refuse_replaced(
    parameters: Iterable[torch.Tensor], replaced: Mapping[torch.Tensor, tuple[Any, str]]
) -> None:
    """Refuse to clip parameters that `prepare` replaced, because those have no gradients.

    Args:
        parameters: the parameters to clip.
        replaced: replaced parameter -> (prepared model, name).

    Raises:
        ConfigurationError: the message has the name of one.
    """
    names = [replaced[one][1] for one in parameters if one in replaced]
    if names:
        raise ConfigurationError(
            f"Gradient clipping got {len(names)} parameter(s) from before prepare(), such as "
            f"{names[0]!r}. The backend replaced them, so they have no gradients. Pass the "
            "parameters of the model that accelerator.prepare(...) returned."
        )


def _check_loss(loss: Any, kwargs: dict[str, Any]) -> None:
    """Raise a clear error, after backward failed, for a loss that backward cannot start from.

    Raises:
        ConfigurationError: the loss is not a tensor with a single element.
    """
    if not isinstance(loss, torch.Tensor):
        raise ConfigurationError(f"backward(loss={loss!r}): loss must be a tensor.") from None
    if loss.numel() != 1 and kwargs.get("gradient") is None:
        raise ConfigurationError(
            f"backward(loss=...): loss has the shape {tuple(loss.shape)}, but backward starts from a "
            "single number. Reduce it first, with loss.mean() or loss.sum()."
        ) from None


@dataclass(eq=False, slots=True)
class MicroBatch:
    """The context of `accumulate`. It is a class because a generator would be slower."""

    _loop: TrainingLoop
    _models: Sequence[torch.nn.Module]
    _num_items: int | float | torch.Tensor | None
    _unsynced: AbstractContextManager[Any] | None = None
    _at_end: Iterable[Callable[[], None]] = ()

    def __enter__(self) -> None:
        loop = self._loop
        state = loop.state
        first = state.sync_gradients
        state.micro_batches += 1
        state.micro_batch_start = state.backwards
        if first:
            state.cycle_start = state.backwards
        # Count one micro-batch and decide whether it ends the cycle.
        if state.sync_with_dataloader and state.end_of_dataloader:
            loop.step = 0
            state.sync_gradients = True
        else:
            loop.step += 1
            state.sync_gradients = loop.step % state.num_steps == 0
        if self._num_items is not None or loop.tokens.open:
            models = self._models or loop.models
            loop.tokens.begin(self._num_items, models, first=first, last=state.sync_gradients)
        if loop.defers_sync and not (state.sync_gradients or state.sync_each_batch):
            self._unsynced = loop.unsynced(self._models or loop.models)
            self._unsynced.__enter__()
        if not (loop.watched or state.sync_gradients):
            loop.watched = True
            self._at_end = loop.shared_hooks.call_each("on_first_micro_batch")

    def __exit__(self, *error: Any) -> bool | None:
        loop = self._loop
        loop.state.micro_batch_start = None
        for end in self._at_end:
            end()
        if loop.tokens.open and loop.state.sync_gradients:
            loop.tokens.open = False
        unsynced = self._unsynced
        self._unsynced = None
        return None if unsynced is None else unsynced.__exit__(*error)
