"""The verbs of a training step."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from accelerate_core.config.handlers import AutocastKwargs
from accelerate_core.contract.schedule import ScheduleResult
from accelerate_core.training.gradient_state import GradientState
from accelerate_core.training.loop import MicroBatch, TrainingLoop


class TrainingVerbs:
    """Accumulation, backward, clipping and mixed precision, as a script calls them."""

    _training: TrainingLoop
    #: Where the loops are in their accumulation cycle.
    gradient_state: GradientState
    autocast_handler: AutocastKwargs | None

    @property
    def step(self) -> int:
        """Micro-batches seen in this cycle."""
        return self._training.step

    @step.setter
    def step(self, value: int) -> None:
        self._training.step = value

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
        return self._training.gradient_accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self._training.gradient_accumulation_steps = value

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether a prepared optimizer's last step was left out because of an overflow."""
        return self._training.optimizer_step_was_skipped

    @property
    def has_lomo_optimizer(self) -> bool:
        """Whether an optimizer steps inside backward."""
        return self._training.has_lomo_optimizer

    def accumulate(
        self, *models: torch.nn.Module, num_items: int | float | torch.Tensor | None = None
    ) -> AbstractContextManager[None]:
        """Make the block one micro-batch of an accumulation cycle.

        Gradients are synchronised, and prepared optimizers and schedulers move,
        only in the cycle's last block and in that of a loader's last batch.

        Args:
            models: the models trained in the block; all prepared ones if none is given.
            num_items: how many items (tokens, samples) of this rank the block's loss is *summed*
                over: a number, or a tensor with one element, which is not read back. The gradients
                of the cycle are then those of the sum of all losses, divided by the number of
                items of all micro-batches and ranks, as if they were one big batch. Nothing is
                divided by the accumulation steps. Pass it in every block of a cycle.

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
        return MicroBatch(self._training, models, num_items)

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
        return self._training.no_sync(model)

    def trigger_sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward synchronises, though forward ran under `no_sync`."""
        return self._training.trigger_sync_in_backward(model)

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None
    ) -> AbstractContextManager[Any]:
        """Return the context of mixed precision; no effect where precision is not mixed.

        Args:
            autocast_handler: used instead of the Accelerator's own.

        Example:
            # the forward of a prepared model runs in it already; other computations do not
            with accelerator.autocast():
                loss = loss_function(model(x), y)
        """
        return self._training.autocast(autocast_handler or self.autocast_handler)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward on a loss: divided by the accumulation steps, scaled, synchronised.

        With `accumulate(num_items=...)` the loss is a sum, and its gradients are divided by the
        number of items after the last backward of the cycle.

        Args:
            loss: scalar tensor.
            kwargs: passed on to `Tensor.backward`; `learning_rate` goes to `lomo_backward`.

        Raises:
            ConfigurationError: `loss` is not a tensor with a single element.

        Example:
            loss = loss_function(model(x), y)
            accelerator.backward(loss)  # in the place of loss.backward()
        """
        self._training.backward(loss, **kwargs)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Run backward of optimizers that step inside it (LOMO's `fused_backward`).

        Args:
            learning_rate: of this step; the LOMO optimizer updates parameters during backward.

        Raises:
            ConfigurationError: no prepared optimizer is one.
        """
        self._training.lomo_backward(loss, learning_rate)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Undo gradient scaling, once per step; no effect without a scaler.

        Args:
            optimizer: one optimizer or a list; all prepared ones if None.
        """
        self._training.unscale_gradients(optimizer)

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2,
    ) -> Any:
        """Clip the norm of all gradients taken together.

        Args:
            max_norm: the largest norm that stays unchanged.
            norm_type: order of the norm; 2 is the Euclidean norm.

        Returns:
            The norm before clipping, a 0-d tensor.

        Example:
            accelerator.backward(loss_function(model(x), y))
            if accelerator.sync_gradients:  # the last micro-batch of a cycle
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        Raises:
            ConfigurationError: `max_norm` is not a number, or `parameters` is a module.
        """
        return self._training.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float
    ) -> None:
        """Clip every gradient element to [-clip_value, clip_value].

        Example:
            accelerator.backward(loss_function(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()

        Raises:
            ConfigurationError: `clip_value` is not a number, or `parameters` is a module.
        """
        self._training.clip_grad_value_(parameters, clip_value)

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
        return self._training.maybe_context_parallel(buffers, buffer_seq_dims, no_restore_buffers)

    def train_step(self, batch: Any, model: torch.nn.Module | None = None) -> ScheduleResult:
        """Run forward and backward of one batch on a backend that owns both.

        Args:
            batch: as the model takes it.
            model: a prepared model; the only one if None.

        Returns:
            The loss (0-d, on every rank) and the outputs. Clipping and stepping are the script's.
        """
        return self._training.train_step(batch, model)

    def eval_step(self, batch: Any, model: torch.nn.Module | None = None) -> ScheduleResult:
        """Run forward of one batch on a backend that owns it; as `train_step` otherwise."""
        return self._training.eval_step(batch, model)
