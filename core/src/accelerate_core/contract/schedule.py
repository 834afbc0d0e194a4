"""The arguments and the result of the hook `run_schedule`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ScheduleStep:
    """How to run one batch.

    Attributes:
        training: whether to run backward.
        sync: whether this backward ends an accumulation cycle and synchronises gradients.
        divide: call it on a loss before its backward. It divides the loss by the number of micro-batches
            or counted items, and multiplies it by the loss scale.
        counted: whether the items of the cycle are counted. The loss must then be a sum over items instead
            of a mean.
    """

    training: bool
    sync: bool
    divide: Callable[[torch.Tensor], torch.Tensor]
    counted: bool = False


class ScheduleResult(NamedTuple):
    """The loss of the whole batch, 0-d and the same on every rank, and the outputs of the model."""

    loss: torch.Tensor
    outputs: Any = None
