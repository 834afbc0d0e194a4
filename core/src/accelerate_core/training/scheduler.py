"""The learning rate scheduler that `prepare` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accelerate_core.pickling import unwrapped
from accelerate_core.training.gradient_state import GradientState
from accelerate_core.training.metric import StepArguments
from accelerate_core.training.optimizer import AcceleratedOptimizer


class AcceleratedScheduler:
    """A scheduler that follows the steps of its optimizers.

    * It does not move inside an accumulation cycle, or if the optimizer's step was skipped.
    * With `scheduler_steps="per_process"` it moves `num_processes` steps at a time: it was written for
      the number of batches of one process, and each of n processes sees an n-th of them. With
      `split_batches` it moves one step, because the number of batches stays the same. Called with a
      metric (`ReduceLROnPlateau`) or an epoch it moves once; n calls with the same metric would count
      as n times without improvement.
    * A metric is the mean over all ranks, or what `scheduler_metric` says, so that all ranks set the same
      learning rates. All ranks must make this call.
    * With `step_with_optimizer=False`, for example if it is stepped once per epoch, it moves when
      called.

    Args:
        scheduler: the scheduler to wrap.
        optimizers: the prepared optimizers that it follows.
        gradient_state: used to find out whether optimizers step now.
        num_processes: the number of steps that it moves at a time.
        step_with_optimizer: whether it follows the optimizers.
        split_batches: whether the batch size is for all processes together.
        arguments: combines metrics over the ranks; None to pass them on.
        on_first_step: called when the scheduler first moves: with the number of steps, and whether it got
            a metric.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Any,
        *,
        gradient_state: GradientState,
        num_processes: int = 1,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        arguments: StepArguments | None = None,
        on_first_step: Callable[[int, bool], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers: list[AcceleratedOptimizer] = (
            list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
        )
        self.gradient_state = gradient_state
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer
        self._arguments = arguments
        self._at_a_time = 1 if split_batches else num_processes
        self._on_first_step = on_first_step

    # A backend that wraps schedulers itself also points them at another optimizer.

    @property
    def optimizer(self) -> Any:
        """The optimizer whose learning rates it sets."""
        return self.scheduler.optimizer

    @optimizer.setter
    def optimizer(self, value: Any) -> None:
        self.scheduler.optimizer = value

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __reduce__(self) -> Any:
        # A pickle or a copy contains the user's own scheduler, as for optimizers.
        return unwrapped, (self.scheduler,)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step if the optimizer did. Arguments (a metric, an epoch) are passed to the scheduler."""
        if not self.step_with_optimizer:
            if args or kwargs:
                args, kwargs = self._combined(args, kwargs)
            self.scheduler.step(*args, **kwargs)
            return
        state = self.gradient_state
        if not state.sync_gradients:
            if state.adjust_scheduler and hasattr(self.scheduler, "_step_count"):
                # torch compares this count with the optimizer's to warn, so calls are counted without moving.
                self.scheduler._step_count += 1
            return
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                return
        if args or kwargs:
            args, kwargs = self._combined(args, kwargs)
        elif self._on_first_step is not None:
            self._on_first_step(self._at_a_time, False)
            self._on_first_step = None
        total = getattr(self.scheduler, "total_steps", None)
        for _ in range(1 if args or kwargs else self._at_a_time):
            # The last n steps may pass the end of a one-cycle schedule, which raises an error there.
            if total is not None and self.scheduler.last_epoch + 1 > total:
                return
            self.scheduler.step(*args, **kwargs)

    def _combined(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments = self._arguments
        if arguments is None:
            return args, kwargs
        if self._on_first_step is not None:
            self._on_first_step(1, arguments.has_metric(args, kwargs))
            self._on_first_step = None
        return arguments.combined(args, kwargs)

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rates set last, one per parameter group."""
        rates: list[float | torch.Tensor] = self.scheduler.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Return the inner scheduler's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the inner scheduler."""
        self.scheduler.load_state_dict(state_dict)
