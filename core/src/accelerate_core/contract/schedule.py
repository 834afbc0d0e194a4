"""One call of `train_step`: what an engine that owns forward and backward is told and returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ScheduleStep:
    """How one batch is run.

    Attributes:
        training: run backward, too.
        sync: gradients are synchronised by this backward: it ends an accumulation cycle.
        divide: what a loss goes through before its backward: it is divided by the micro-batches
            of the cycle, or counted by items, and scaled.
        counted: the items of the cycle are counted: a loss is to be their sum, not their mean.
    """

    training: bool
    sync: bool
    divide: Callable[[torch.Tensor], torch.Tensor]
    counted: bool = False


class ScheduleResult(NamedTuple):
    """The loss of the whole batch, 0-d and on every rank, and whatever the model gave."""

    loss: torch.Tensor
    outputs: Any = None
