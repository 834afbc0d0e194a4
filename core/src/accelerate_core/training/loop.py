"""The step: accumulation, backward, clipping, mixed precision."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from accelerate_core.config.handlers import AutocastKwargs
from accelerate_core.contract.hooks import wrong_answer
from accelerate_core.contract.schedule import ScheduleResult, ScheduleStep
from accelerate_core.contract.view import AcceleratorView
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.errors import ConfigurationError
from accelerate_core.training.gradient_state import GradientState
from accelerate_core.training.loss_scaler import LossScaler
from accelerate_core.training.optimizer import AcceleratedOptimizer
from accelerate_core.training.token_count import TokenCount


class TrainingLoop:
    """The step: accumulation, backward, clipping, mixed precision.

    Args:
        accelerator: for the hooks.
        state: where the loops are in their accumulation cycle.
        comm: the ranks over which a loss is summed.
        scaler: torch's gradient scaler, None where losses are not scaled.
    """

    def __init__(
        self,
        accelerator: AcceleratorView,
        state: GradientState,
        comm: Communicator,
        scaler: Any | None,
    ) -> None:
        backend, hooks = accelerator.backend, accelerator.hooks
        self._accelerator = accelerator
        self._hooks = hooks
        self.distributed = accelerator.num_processes > 1
        self._divides_loss = "accumulation" not in backend.owns
        self.models: Sequence[torch.nn.Module] = accelerator.models
        self.optimizers: Sequence[AcceleratedOptimizer] = accelerator.optimizers
        self.state = state
        #: Micro-batches seen in the current accumulation cycle.
        self.step = 0
        refusal = None
        if not (self._divides_loss or backend.supports.get("num_items", False)):
            refusal = (
                f"The backend {backend.name!r} accumulates by itself and cannot count "
                "items: leave num_items out, and let each loss be a mean."
            )
        self.tokens = TokenCount(comm, partial(hooks.scale_gradients, accelerator), refusal)
        self.scaler: LossScaler | None = None
        if scaler is not None:
            unscale = partial(hooks.unscale_gradients, accelerator)
            self.scaler = LossScaler(scaler, self.optimizers, unscale)

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

        Example:
            for x, y in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_function(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()

            # The same with losses that are summed, here over the samples that have a label:
            for x, y in loader:
                with accelerator.accumulate(model, num_items=(y != -100).sum()):
                    loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
        """
        return _MicroBatch(self, models, num_items)

    def no_sync(self, model: torch.nn.Module | None = None) -> AbstractContextManager[Any]:
        """Return a context in which backward does not synchronise gradients.

        Args:
            model: the model it holds for; all prepared ones if none is given.

        Example:
            with accelerator.no_sync(model):
                accelerator.backward(loss_function(model(x), y))  # stays on this rank
            accelerator.backward(loss_function(model(x), y))  # sends both
            optimizer.step()
        """
        return self.unsynced([model] if model is not None else self.models)

    def unsynced(self, models: Sequence[torch.nn.Module]) -> AbstractContextManager[Any]:
        """Return `no_sync` of several models."""
        stack = ExitStack()
        for model in models if self.distributed else ():
            stack.enter_context(self._hooks.no_sync(self._accelerator, model))
        return stack

    def trigger_sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward synchronises, though forward ran under `no_sync`."""
        if not self.distributed:
            return nullcontext()
        return self._hooks.trigger_sync_in_backward(self._accelerator, model)  # type: ignore[no-any-return]

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward on a loss: divided by the accumulation steps, scaled, synchronised.

        Where `accumulate` was told `num_items`, the loss is a sum, and its gradients are divided
        by the number of items once the cycle's last one is there.

        Args:
            loss: scalar tensor.
            kwargs: passed on to `Tensor.backward`; `learning_rate` goes to `lomo_backward`.

        Example:
            loss = loss_function(model(x), y)
            accelerator.backward(loss)  # in the place of loss.backward()
        """
        learning_rate = kwargs.pop("learning_rate", None) if kwargs else None
        if learning_rate is not None and self._fused_optimizers():
            self.lomo_backward(self._divided(loss), learning_rate)
            return
        tokens, state = self.tokens, self.state
        # As `_divided`, without its call: this runs in every step.
        if tokens.open:
            loss = tokens.divided(loss)
        elif self._divides_loss and state.num_steps > 1:
            loss = loss / state.num_steps
        if self.scaler is not None:
            self.scaler.settle()
            loss = self._hooks.scale_loss(self._accelerator, loss)
        self._hooks.backward(self._accelerator, loss, kwargs)
        state.backwards += 1
        if tokens.open:
            tokens.apply()

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
        """Run backward of optimizers that step inside it (LOMO's `fused_backward`).

        Args:
            learning_rate: of this step; the LOMO optimizer updates parameters during backward.

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

        Example:
            # forward of a prepared model is in it already; what is computed beside it is not
            with accelerator.autocast():
                loss = loss_function(model(x), y)
        """
        handler = autocast_handler or self._accelerator.autocast_handler
        return self._hooks.autocast(self._accelerator, None, handler)  # type: ignore[no-any-return]

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Undo gradient scaling, once per step; no effect without a scaler.

        Args:
            optimizer: one optimizer or a list; all prepared ones if None.
        """
        if self.scaler is None:
            return
        chosen = self.optimizers if optimizer is None else optimizer
        several = chosen if isinstance(chosen, list | tuple) else [chosen]
        inner = [one.optimizer if isinstance(one, AcceleratedOptimizer) else one for one in several]
        self.scaler.unscale(inner)

    def scaler_stepped(self, optimizer: Any) -> None:
        """Note that the scaler stepped an inner optimizer."""
        if self.scaler is not None:
            self.scaler.note_step(optimizer)

    def settle(self) -> None:
        """Make a scale update that waits for other optimizers now, before state is kept."""
        if self.scaler is not None:
            self.scaler.settle()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the norm of all gradients taken together.

        Args:
            max_norm: the largest norm that is left as it is.
            norm_type: which norm: 2 is the Euclidean one.

        Returns:
            The norm before clipping, a 0-d tensor.

        Example:
            accelerator.backward(loss_function(model(x), y))
            if accelerator.sync_gradients:  # the last micro-batch of a cycle
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        """
        tensors, scale = self._clippable(parameters)
        norm = self._hooks.clip_grad(self._accelerator, tensors, max_norm * scale, norm_type, None)
        return norm if scale == 1.0 else norm / scale

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip every gradient element to [-clip_value, clip_value].

        Example:
            accelerator.backward(loss_function(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
        """
        tensors, scale = self._clippable(parameters)
        self._hooks.clip_grad(self._accelerator, tensors, None, 2.0, clip_value * scale)

    def _clippable(self, parameters: Any) -> tuple[list[torch.Tensor], float]:
        """Return parameters, and what their gradients are multiplied by.

        Inside a cycle they stay scaled, and only then is the scale read from the device.
        """
        single = isinstance(parameters, torch.Tensor)
        tensors = [parameters] if single else list(parameters)
        if self.scaler is None:
            return tensors, 1.0
        if not self.state.sync_gradients:
            return tensors, self.scaler.scale()
        self.scaler.unscale_owners(tensors)
        return tensors, 1.0

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
        self.settle()
        result = self._run_schedule(model, batch, training=True)
        self.state.backwards += 1
        if self.tokens.open:
            self.tokens.apply()
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
            return self._hooks.scale_loss(self._accelerator, self._divided(loss))  # type: ignore[no-any-return]

        step = ScheduleStep(training, self.state.sync_gradients, divide, self.tokens.open)
        chosen = self.models[0] if model is None else model
        result = self._hooks.run_schedule(self._accelerator, chosen, batch, step)
        if not isinstance(result, ScheduleResult) or getattr(result.loss, "ndim", None) != 0:
            wanted = "a ScheduleResult with a 0-d loss"
            raise wrong_answer("run_schedule", self._accelerator, result, wanted)
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
        return self._hooks.context_parallel(  # type: ignore[no-any-return]
            self._accelerator, buffers, buffer_seq_dims, no_restore_buffers
        )


@dataclass(eq=False, slots=True)
class _MicroBatch:
    """The context of `accumulate`; a class, since a generator costs more than all it does."""

    _loop: TrainingLoop
    _models: Sequence[torch.nn.Module]
    _num_items: int | float | torch.Tensor | None
    _unsynced: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        loop = self._loop
        state = loop.state
        first = state.sync_gradients
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
        if loop.distributed and not (state.sync_gradients or state.sync_each_batch):
            self._unsynced = loop.unsynced(self._models or loop.models)
            self._unsynced.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        loop = self._loop
        if loop.tokens.open and loop.state.sync_gradients:
            loop.tokens.open = False
        unsynced, self._unsynced = self._unsynced, None
        return None if unsynced is None else unsynced.__exit__(*error)
