"""The learning rate scheduler that `prepare` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accelerate_core.pickling import unwrapped
from accelerate_core.training.gradient_state import GradientState
from accelerate_core.training.optimizer import AcceleratedOptimizer


class AcceleratedScheduler:
    """A scheduler that follows the steps of its optimizers.

    * Inside an accumulation cycle, and where the optimizer's step was skipped, it stands still.
    * `num_processes` steps at a time, if `scheduler_steps` is "per_process": it was written for one
      process's number of batches, of which n processes see an n-th each. With `split_batches` one,
      as nothing changed. Called with
      a metric (`ReduceLROnPlateau`) or an epoch it steps once: n times the same one would be n
      times without getting better.
    * `step_with_optimizer=False` (stepped per epoch, say): it steps as called.

    Args:
        gradient_state: says whether optimizers step now.
        on_first_step: called once, when the scheduler first moves.
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
        on_first_step: Callable[[], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers: list[AcceleratedOptimizer] = (
            list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
        )
        self.gradient_state = gradient_state
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer
        self._at_a_time = 1 if split_batches else num_processes
        self._on_first_step = on_first_step

    #: A backend that wraps schedulers itself has them pointed at another optimizer, too.

    @property
    def optimizer(self) -> Any:
        """Whose rates it sets."""
        return self.scheduler.optimizer

    @optimizer.setter
    def optimizer(self, value: Any) -> None:
        self.scheduler.optimizer = value

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __reduce__(self) -> Any:
        # As for optimizers: a pickle or a copy is of the user's own scheduler.
        return unwrapped, (self.scheduler,)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step as the optimizer did; arguments (a metric, an epoch) are passed on."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        state = self.gradient_state
        if not state.sync_gradients:
            if state.adjust_scheduler and hasattr(self.scheduler, "_step_count"):
                # Calls are counted although nothing moves: torch warns by this count.
                self.scheduler._step_count += 1
            return
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                return
        if self._on_first_step is not None:
            self._on_first_step()
            self._on_first_step = None
        total = getattr(self.scheduler, "total_steps", None)
        for _ in range(1 if args or kwargs else self._at_a_time):
            # The last round of n may reach over the end that a one-cycle schedule refuses to pass.
            if total is not None and self.scheduler.last_epoch + 1 > total:
                return
            self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """Return the rates that were set last, one per parameter group."""
        rates: list[float | torch.Tensor] = self.scheduler.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Return the inner scheduler's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of `state_dict` into the inner scheduler."""
        self.scheduler.load_state_dict(state_dict)
