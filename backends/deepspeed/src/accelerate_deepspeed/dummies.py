"""Stand-ins for an optimizer and a scheduler that the config describes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["DummyOptim", "DummyScheduler"]


class DummyOptim:
    """Holds the place of the optimizer in the config's section `optimizer`.

    Args:
        params: parameters or groups of them, as for an optimizer.
        lr: learning rate where the config says "auto".
        weight_decay: weight decay where the config says "auto".
        optimizer_callable: makes the optimizer from the parameters, where the config has none.
        kwargs: further hyperparameters where the config says "auto".
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.001,
        weight_decay: float = 0.0,
        optimizer_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.params = list(params)
        self.optimizer_callable = optimizer_callable
        self.lr, self.weight_decay, self.kwargs = lr, weight_decay, kwargs

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameters as groups."""
        if self.params and isinstance(self.params[0], dict):
            return self.params
        return [{"params": self.params}]


class DummyScheduler:
    """Holds the place of the scheduler in the config's section `scheduler`, or of a function's.

    Args:
        optimizer: the optimizer it is for.
        total_num_steps: steps of the whole schedule where the config says "auto".
        warmup_num_steps: steps of warming up where the config says "auto".
        lr_scheduler_callable: makes the scheduler from the optimizer that is really stepped; then
            the config must not have one.
        kwargs: further parameters where the config says "auto".

    Both numbers count as for one process, in batches of a loader that is not shared out; they are
    divided by the number of ranks with different samples, as the steps are.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps, self.warmup_num_steps = total_num_steps, warmup_num_steps
        self.lr_scheduler_callable, self.kwargs = lr_scheduler_callable, kwargs
