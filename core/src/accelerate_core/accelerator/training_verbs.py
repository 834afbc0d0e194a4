"""The Accelerator's methods for a training step."""

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
    """The Accelerator's methods for accumulation, backward, clipping and mixed precision."""

    _training: TrainingLoop
    #: The position in the accumulation cycle.
    gradient_state: GradientState
    autocast_handler: AutocastKwargs | None

    @property
    def step(self) -> int:
        """Number of micro-batches so far in this accumulation cycle."""
        return self._training.step

    @step.setter
    def step(self, value: int) -> None:
        self._training.step = value

    @property
    def sync_gradients(self) -> bool:
        """Whether gradients are synchronised and optimizers step in this micro-batch."""
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
        """Whether a prepared optimizer skipped its last step because a gradient overflowed."""
        return self._training.optimizer_step_was_skipped

    @property
    def has_lomo_optimizer(self) -> bool:
        """Whether a prepared optimizer steps inside backward."""
        return self._training.has_lomo_optimizer

    def accumulate(
        self, *models: torch.nn.Module, num_items: int | float | torch.Tensor | None = None
    ) -> AbstractContextManager[None]:
        """Run the block as one micro-batch of an accumulation cycle.

        Gradients are only synchronised, and prepared optimizers and schedulers only step, in the last
        block of a cycle and in the block with a loader's last batch.

        Args:
            models: the models that the block trains; by default, all prepared models.
            num_items: the number of items (tokens, samples) on this rank over which the block's loss is
                *summed*: a number, or a tensor with one element, which is not read back to the host. The
                gradients of a cycle are then computed from the sum of all losses, divided by the number of
                items in all micro-batches on all ranks, like in one big batch. They aren't divided by the
                accumulation steps. Pass it in every block of a cycle.

        Raises:
            ConfigurationError: only some blocks of a cycle pass `num_items`, or the backend accumulates
                itself and doesn't support it.

        Example:
            for x, y in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_function(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()

            # The same with summed losses, here over the samples that have a label:
            for x, y in loader:
                with accelerator.accumulate(model, num_items=(y != -100).sum()):
                    loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
        """
        return MicroBatch(self._training, models, num_items)

    def no_sync(self, model: torch.nn.Module | None = None) -> AbstractContextManager[Any]:
        """Return a context in which backward doesn't synchronise gradients.

        Args:
            model: the model to which this applies; by default, all prepared models.

        Example:
            with accelerator.no_sync(model):
                accelerator.backward(loss_function(model(x), y))  # stays on this rank
            accelerator.backward(loss_function(model(x), y))  # sends both
            optimizer.step()
        """
        return self._training.no_sync(model)

    def trigger_sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward synchronises, although forward ran in `no_sync`."""
        return self._training.trigger_sync_in_backward(model)

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None
    ) -> AbstractContextManager[Any]:
        """Return the mixed precision context. Without mixed precision, it has no effect.

        Args:
            autocast_handler: options to use instead of the Accelerator's.

        Example:
            # the forward of a prepared model already runs in this context; other computations don't
            with accelerator.autocast():
                loss = loss_function(model(x), y)
        """
        return self._training.autocast(autocast_handler or self.autocast_handler)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward on a loss, after dividing it by the accumulation steps and scaling it.

        With `accumulate(num_items=...)`, the loss is a sum, and its gradients are divided by the number
        of items after the last backward of the cycle.

        Args:
            loss: a tensor with one element.
            kwargs: arguments of `Tensor.backward`. `learning_rate` is passed to `lomo_backward`.

        Raises:
            ConfigurationError: `loss` is not a tensor with a single element.

        Example:
            loss = loss_function(model(x), y)
            accelerator.backward(loss)  # instead of loss.backward()
        """
        self._training.backward(loss, **kwargs)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Run the backward of an optimizer that steps inside it (LOMO's `fused_backward`).

        Args:
            loss: a tensor with one element.
            learning_rate: the rate for this step, because LOMO updates parameters during backward.

        Raises:
            ConfigurationError: no prepared optimizer is a LOMO optimizer.
        """
        self._training.lomo_backward(loss, learning_rate)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the loss scale, once per step. Without a gradient scaler, this has no effect.

        Args:
            optimizer: an optimizer or a list; by default, all prepared optimizers.
        """
        self._training.unscale_gradients(optimizer)

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2,
    ) -> Any:
        """Clip the global norm of gradients.

        Args:
            parameters: the parameters whose gradients to clip.
            max_norm: the largest norm that isn't clipped.
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
        """Return a context in which buffers are sharded along their sequence dimension.

        Without context or sequence parallelism, it has no effect.

        Args:
            buffers: tensors to shard. They are changed in place inside the block.
            buffer_seq_dims: the sequence dimension of each buffer.
            no_restore_buffers: buffers that don't have to be restored after the block.
        """
        return self._training.maybe_context_parallel(buffers, buffer_seq_dims, no_restore_buffers)

    def train_step(self, batch: Any, model: torch.nn.Module | None = None) -> ScheduleResult:
        """Run forward and backward of one batch, with a backend that runs them together.

        The script still clips gradients and steps the optimizer.

        Args:
            batch: a batch in the form that the model takes.
            model: a prepared model. With None, there must be only one.

        Returns:
            The loss (0-d, the same on every rank) and the outputs.
        """
        return self._training.train_step(batch, model)

    def eval_step(self, batch: Any, model: torch.nn.Module | None = None) -> ScheduleResult:
        """Run only the forward of one batch; otherwise like `train_step`."""
        return self._training.eval_step(batch, model)
