"""Names of Hugging Face Accelerate around DeepSpeed that nothing here needs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from accelerate_core.distributed.process import current_user
from accelerate_core.errors import ConfigurationError
from accelerate_core.training.optimizer import AcceleratedOptimizer
from accelerate_core.training.scheduler import AcceleratedScheduler

_F = TypeVar("_F", bound=Callable[..., Any])


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """An optimizer that `backward` steps. `prepare` makes none: here `optimizer.step()` does it."""


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A scheduler that the engine steps. `prepare` makes none: here `scheduler.step()` does it."""


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
