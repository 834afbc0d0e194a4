"""The step: accumulation, backward, clipping, mixed precision."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, cast

import torch

from accelerate_core import profiling
from accelerate_core.config.handlers import AutocastKwargs, ProfileKwargs
from accelerate_core.contract.schedule import ScheduleResult, ScheduleStep
from accelerate_core.data.prepare import override_even_batches
from accelerate_core.errors import ConfigurationError
from accelerate_core.facade.place import Place
from accelerate_core.training.optimizer import AcceleratedOptimizer


class Stepping(Place):
    """The step: accumulation, backward, clipping, mixed precision."""

    @property
    def sync_gradients(self) -> bool:
        """Whether gradients are synchronised, and optimizers stepped, now."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        if value < 1:
            raise ConfigurationError(
                f"gradient_accumulation_steps must be at least 1, not {value}."
            )
        self.gradient_state.num_steps = value

    def accumulate(
        self, *models: torch.nn.Module, num_items: int | float | torch.Tensor | None = None
    ) -> AbstractContextManager[None]:
        """Make the block one micro-batch of an accumulation cycle.

        Gradients are synchronised, and prepared optimizers and schedulers move,
        only in the cycle's last block and in that of a loader's last batch.

        Args:
            models: the models trained in the block; all prepared ones if none is given.
            num_items: over how many items (tokens, samples) of this rank the block's loss is
                *summed*: a number, or a tensor of one element, which is not read back. The
                gradients of the cycle are then those of the sum of all losses divided by the
                number of all items, of all micro-batches and ranks, as of one big batch; nothing
                is divided by the accumulation steps. Give it for every block of a cycle.

        Raises:
            ConfigurationError: `num_items` is given for some blocks of a cycle only, or the
                backend accumulates by itself and cannot.

            with accelerator.accumulate(model, num_items=(labels != -100).sum()):
                logits = model(tokens).flatten(0, 1)
                loss = cross_entropy(logits, labels.flatten(), reduction="sum")
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        """
        return _MicroBatch(self, models, num_items)

    def _count(
        self,
        items: int | float | torch.Tensor | None,
        models: Sequence[torch.nn.Module],
        first: bool,
    ) -> None:
        can = self._divides_loss or self.backend.supports.get("num_items", False)
        if items is not None and not can:
            raise ConfigurationError(
                f"The backend {self.backend.name!r} accumulates by itself and cannot count "
                "items: leave num_items out, and let each loss be a mean."
            )
        self._items.add(items, first)
        self._counted_models = models or self.models
        if items is not None and self.gradient_state.sync_gradients:
            self._items.settle(self._loss_communicator)

    def no_sync(self, model: torch.nn.Module | None = None) -> AbstractContextManager[Any]:
        """Return a context in which backward does not synchronise gradients.

        Args:
            model: the model it holds for; all prepared ones if none is given.
        """
        return self._no_sync([model] if model is not None else self.models)

    def _no_sync(self, models: Sequence[torch.nn.Module]) -> AbstractContextManager[Any]:
        if not self.use_distributed:
            return nullcontext()
        stack = ExitStack()
        for model in models:
            stack.enter_context(self.hooks.no_sync(self, model))
        return stack

    def trigger_sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward synchronises, though forward ran under `no_sync`."""
        if not self.use_distributed:
            return nullcontext()
        return cast("AbstractContextManager[Any]", self.hooks.trigger_sync_in_backward(self, model))

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Return a context in which ranks may run out of batches at different steps.

        No effect on one process or where the backend cannot.

        Args:
            joinables: prepared models.
            even_batches: overrides the loaders' setting inside the block.
        """
        stack = ExitStack()
        if self.use_distributed and self.backend.supports.get("join", False):
            if even_batches is not None:
                stack.enter_context(override_even_batches(self.loaders, even_batches))
            stack.enter_context(self.hooks.join_uneven_inputs(self, joinables))
        return stack

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward on a loss: divided by the accumulation steps, scaled, synchronised.

        Where `accumulate` was told `num_items`, the loss is a sum, and its gradients are divided
        by the number of items once the cycle's last one is there.

        Args:
            loss: scalar tensor.
            kwargs: passed on to `Tensor.backward`; `learning_rate` goes to `lomo_backward`.
        """
        learning_rate = kwargs.pop("learning_rate", None) if kwargs else None
        if learning_rate is not None and self._fused_optimizers():
            self.lomo_backward(self._divided(loss), learning_rate)
            return
        counted = self._items.open
        # As `_divided`, without its call: this runs in every step.
        if counted:
            loss = self._items.divided(loss)
        elif self._divides_loss and self.gradient_state.num_steps > 1:
            loss = loss / self.gradient_state.num_steps
        if self._scaler is not None:
            if self._scaled_steps:
                self._update_scaler()
            loss = self.hooks.scale_loss(self, loss)
        self.hooks.backward(self, loss, kwargs)
        self.gradient_state.backwards += 1
        if counted:
            self._scale_counted()

    def _divided(self, loss: torch.Tensor) -> torch.Tensor:
        if self._items.open:
            return self._items.divided(loss)
        if self._divides_loss and self.gradient_state.num_steps > 1:
            return loss / self.gradient_state.num_steps
        return loss

    def _scale_counted(self) -> None:
        if not self._items.applied and self._items.factor is not None:
            self.hooks.scale_gradients(self, self._counted_models, self._items.factor)
            self._items.applied = True

    def _fused_optimizers(self) -> list[Any]:
        return [o.optimizer for o in self.optimizers if hasattr(o.optimizer, "fused_backward")]

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Run backward of optimizers that step inside it (LOMO's `fused_backward`).

        Raises:
            ConfigurationError: no prepared optimizer is one.
        """
        fused = self._fused_optimizers()
        if not fused:
            raise ConfigurationError(
                "No prepared optimizer has a fused_backward, such as Lomo or AdaLomo."
            )
        for optimizer in fused:
            optimizer.fused_backward(loss, learning_rate)

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None
    ) -> AbstractContextManager[Any]:
        """Return the context of mixed precision; no effect where precision is not mixed.

        Args:
            autocast_handler: used instead of the Accelerator's own.
        """
        handler = autocast_handler or self.autocast_handler
        return cast("AbstractContextManager[Any]", self.hooks.autocast(self, None, handler))

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Undo gradient scaling, once per step; no effect without a scaler.

        Args:
            optimizer: one optimizer or a list; all prepared ones if None.
        """
        if self._scaler is None:
            return
        chosen = self.optimizers if optimizer is None else optimizer
        for one in chosen if isinstance(chosen, list | tuple) else [chosen]:
            inner = one.optimizer if isinstance(one, AcceleratedOptimizer) else one
            if id(inner) not in self._unscaled and _has_gradients(inner):
                self.hooks.unscale_gradients(self, inner)
                self._unscaled.add(id(inner))

    def scaler_stepped(self, optimizer: Any) -> None:
        """Note that the scaler stepped an optimizer; the scale is updated once all have.

        With several optimizers the update waits for the next backward: updating
        between two steps would forget that the second is unscaled already.
        """
        self._unscaled.discard(id(optimizer))
        self._scaled_steps.add(id(optimizer))
        if len(self._scaled_steps) >= len(self.optimizers):
            self._update_scaler()

    def settle_scale(self) -> None:
        """Make a scale update that waits for other optimizers now, before state is kept."""
        if self._scaled_steps:
            self._update_scaler()

    def _update_scaler(self) -> None:
        """Update the scale; who is unscaled and has not stepped yet stays so.

        `GradScaler.update` forgets all of them, and would divide their gradients once more.
        """
        if self._scaler is None:
            return
        waiting = [
            optimizer.optimizer
            for optimizer in self.optimizers
            if id(optimizer.optimizer) in self._unscaled and _has_gradients(optimizer.optimizer)
        ]
        states = self._scaler._per_optimizer_states
        kept = {id(optimizer): states[id(optimizer)] for optimizer in waiting}
        self._scaler.update()
        self._scaler._per_optimizer_states.update(kept)
        self._scaled_steps.clear()
        self._unscaled.intersection_update(kept)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the norm of all gradients taken together.

        Returns:
            The norm before clipping, a 0-d tensor.
        """
        tensors = _as_list(parameters)
        self._unscale_owners(tensors)
        scale = self._scale_left()
        if scale != 1.0:
            norm = self.hooks.clip_grad(self, tensors, max_norm * scale, norm_type, None)
            return norm / scale
        return self.hooks.clip_grad(self, tensors, max_norm, norm_type, None)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip every gradient element to [-clip_value, clip_value]."""
        tensors = _as_list(parameters)
        self._unscale_owners(tensors)
        self.hooks.clip_grad(self, tensors, None, 2.0, clip_value * self._scale_left())

    def _scale_left(self) -> float:
        """Return what gradients are multiplied by inside a cycle, where they stay scaled.

        Only then is it read from the device; on the boundary they are unscaled before.
        """
        if self._scaler is None or self.sync_gradients:
            return 1.0
        return float(self._scaler.get_scale())

    def _unscale_owners(self, tensors: Sequence[torch.Tensor]) -> None:
        """Unscale the optimizers of these parameters only: another may be mid-cycle."""
        if self._scaler is None or not self.sync_gradients:
            return
        wanted = {id(tensor) for tensor in tensors}
        for optimizer in self.optimizers:
            if any(id(p) in wanted for g in optimizer.param_groups for p in g["params"]):
                self.unscale_gradients(optimizer)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether a prepared optimizer's last step was left out because of an overflow."""
        return any(optimizer.step_was_skipped for optimizer in self.optimizers)

    def train_step(self, batch: Any, model: torch.nn.Module | None = None) -> ScheduleResult:
        """Run forward and backward of one batch on a backend that owns both.

        Args:
            batch: as the model takes it.
            model: a prepared model; the only one if None.

        Returns:
            The loss (0-d, on every rank) and the outputs. Clipping and stepping are the script's.
        """
        if self._scaled_steps:
            self._update_scaler()
        result = self._run_schedule(model, batch, training=True)
        self.gradient_state.backwards += 1
        if self._items.open:
            self._scale_counted()
        return result

    def eval_step(self, batch: Any, model: torch.nn.Module | None = None) -> ScheduleResult:
        """Run forward of one batch on a backend that owns it; as `train_step` otherwise."""
        return self._run_schedule(model, batch, training=False)

    def _run_schedule(
        self, model: torch.nn.Module | None, batch: Any, *, training: bool
    ) -> ScheduleResult:
        if model is None and len(self.models) != 1:
            raise ConfigurationError(
                f"{len(self.models)} models are prepared: name the one to run, "
                "train_step(batch, model)."
            )

        def divide(loss: torch.Tensor) -> torch.Tensor:
            loss = self._divided(loss)
            scaled: torch.Tensor = self.hooks.scale_loss(self, loss)
            return scaled

        step = ScheduleStep(training, self.sync_gradients, divide)
        chosen = self.models[0] if model is None else model
        result: ScheduleResult = self.hooks.run_schedule(self, chosen, batch, step)
        return result

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[Any]:
        """Return a context in which buffers are sharded along the sequence; else no effect.

        Args:
            buffers: tensors changed in place inside the block.
            buffer_seq_dims: the sequence dimension of each.
            no_restore_buffers: those that need not be restored.
        """
        context = self.hooks.context_parallel(self, buffers, buffer_seq_dims, no_restore_buffers)
        return cast("AbstractContextManager[Any]", context)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a context that profiles with `torch.profiler` and yields its profiler."""
        return profiling.profile(profile_handler or self.profile_handler, self.process_index)


class _MicroBatch:
    """The context of `accumulate`; a class, since a generator costs more than all it does."""

    __slots__ = ("_accelerator", "_models", "_num_items", "_unsynced")

    def __init__(
        self,
        accelerator: Stepping,
        models: Sequence[torch.nn.Module],
        num_items: int | float | torch.Tensor | None,
    ) -> None:
        self._accelerator = accelerator
        self._models = models
        self._num_items = num_items
        self._unsynced: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        accelerator = self._accelerator
        state = accelerator.gradient_state
        first = state.sync_gradients
        # Count one micro-batch and decide whether it ends the cycle.
        if state.sync_with_dataloader and state.end_of_dataloader:
            accelerator.step = 0
            state.sync_gradients = True
        else:
            accelerator.step += 1
            state.sync_gradients = accelerator.step % state.num_steps == 0
        if self._num_items is not None or accelerator._items.open:
            accelerator._count(self._num_items, self._models, first)
        if not (state.sync_gradients or state.sync_each_batch) and accelerator.use_distributed:
            self._unsynced = accelerator._no_sync(self._models or accelerator.models)
            self._unsynced.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        accelerator = self._accelerator
        if accelerator._items.open and accelerator.gradient_state.sync_gradients:
            accelerator._items.close()
        unsynced, self._unsynced = self._unsynced, None
        return None if unsynced is None else unsynced.__exit__(*error)


def _as_list(parameters: Any) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _has_gradients(optimizer: Any) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
