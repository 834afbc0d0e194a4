"""Names of Hugging Face Accelerate around DeepSpeed that nothing here needs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from accelerate_core.distributed.process import current_user
from accelerate_core.errors import ConfigurationError
from accelerate_core.training.gradient_state import GradientState
from accelerate_core.training.optimizer import AcceleratedOptimizer
from accelerate_core.training.scheduler import AcceleratedScheduler

_F = TypeVar("_F", bound=Callable[..., Any])


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """An optimizer that somebody else steps. `prepare` makes none: here `optimizer.step()` does it."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(
            optimizer,
            gradient_state=GradientState(),
            step=lambda *_: True,
            zero_grad=lambda *_: None,
        )

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out because a gradient overflowed."""
        return bool(getattr(self.optimizer, "overflow", False))


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A scheduler that the engine steps. `prepare` makes none: here `scheduler.step()` does it."""

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler, optimizers, gradient_state=GradientState())

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


def deepspeed_required(func: _F) -> _F:
    """Decorate a function that is for runs with DeepSpeed only.

    Raises:
        ConfigurationError: an Accelerator runs with another backend, when it is called.
    """

    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        user = current_user()
        kind = None if user is None else user.distributed_type
        if kind not in (None, "DEEPSPEED"):
            raise ConfigurationError(
                f"{func.__name__}() is for DeepSpeed, and this run is {kind}. Pass a "
                "DeepSpeedPlugin to the Accelerator, or start it with --use_deepspeed."
            )
        return func(*args, **kwargs)

    return checked  # type: ignore[return-value]
