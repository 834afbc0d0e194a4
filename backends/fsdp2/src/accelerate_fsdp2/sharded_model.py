"""The backend's record of each sharded model: torch's parameter groups, and unreduced gradients.

It is created in `prepare`, so that a step doesn't have to traverse the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate_fsdp2.gradients import groups_of, local


class ShardedModel:
    """The record of one model that was sharded with `fully_shard`.

    Args:
        model: the prepared model.
        whole: trainable parameters that are not sharded. The backend averages their gradients.
        added: parameters whose gradients are summed over the ranks of `tp`.
    """

    def __init__(
        self,
        model: nn.Module,
        whole: Sequence[nn.Parameter] = (),
        added: Sequence[nn.Parameter] = (),
    ) -> None:
        self._model = weakref.ref(model)
        #: torch's groups of parameters. Each group is reduced at once.
        self.groups: list[Any] = list(groups_of(model))
        self.whole = list(whole)
        self.added = list(added)
        #: Parameters whose `grad` a hook of the model sums over the ranks of `tp` in each backward. It
        #: would sum what earlier micro-batches left there once more.
        self.summed_by_model: list[nn.Parameter] = []
        #: Whether a backward reduces gradients. `set_requires_gradient_sync` has the same meaning.
        self.synced = True
        #: Whether there are unreduced gradients.
        self.waiting = False
        self._parameter_ids = {id(parameter) for parameter in model.parameters()}

    @property
    def model(self) -> nn.Module | None:
        """The model, or None after it was deleted."""
        return self._model()

    @property
    def has_unreduced(self) -> bool:
        """Whether a step now would miss gradients, because they are not or will not be reduced."""
        return self.waiting or not self.synced

    def holds_any(self, parameter_ids: Iterable[int]) -> bool:
        """Return whether the model has a parameter with one of these ids."""
        return not self._parameter_ids.isdisjoint(parameter_ids)

    def set_synced(self, synced: bool) -> None:
        """Set whether the next backward reduces gradients."""
        for group in self.groups:
            group.reduce_grads = synced
            group.all_reduce_grads = synced
        self.synced = synced

    def look_for_unreduced(self) -> None:
        """Set `waiting` if a backward has left unreduced gradients."""
        # No function call per parameter, because this runs in every micro-batch.
        for group in self.groups:
            for parameter in group.fsdp_params:
                if parameter.unsharded_accumulated_grad is not None:
                    self.waiting = True
                    return
                unsharded = getattr(parameter, "_unsharded_param", None)
                if unsharded is not None and unsharded.grad is not None:
                    self.waiting = True
                    return
        self.waiting = False

    def forget_gradients(self) -> None:
        """Drop unreduced gradients, which the optimizer's `zero_grad` cannot clear."""
        for group in self.groups:
            group._partial_reduce_output = None
            for parameter in group.fsdp_params:
                if "unsharded_accumulated_grad" in vars(parameter):  # up to torch 2.14
                    parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
        self.waiting = False

    def added_gradients(self) -> dict[nn.Parameter, torch.Tensor | None]:
        """Return copies of the current gradients of `added`, before a backward adds to them."""
        found: dict[nn.Parameter, torch.Tensor | None] = {}
        if self.synced:
            for parameter in self.added:
                grad = parameter.grad
                found[parameter] = None if grad is None else local(grad).clone()
        return found


class Synced:
    """A context that sets whether a model's backward reduces gradients.

    This is a class, because a generator-based context manager would make more Python calls.
    """

    __slots__ = ("_before", "_model", "_synced")

    def __init__(self, model: ShardedModel, synced: bool) -> None:
        self._model = model
        self._synced = synced
        self._before = model.synced

    def __enter__(self) -> None:
        self._before = self._model.synced
        if self._before != self._synced:
            self._model.set_synced(self._synced)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before != self._synced:
            self._model.set_synced(self._before)


@torch.no_grad()
def add_up(before: dict[nn.Parameter, torch.Tensor | None], group: Any) -> None:
    """Sum over `group` what a backward added to the gradients since `before` was copied."""
    for parameter, earlier in before.items():
        if parameter.grad is None:
            continue
        grad = local(parameter.grad)
        if earlier is not None:
            grad.sub_(earlier)
        dist.all_reduce(grad, group=group)
        if earlier is not None:
            grad.add_(earlier)
