"""The state of the last step boundary, for backends that cannot give the gradients of a cycle.

Where gradients are in a backend's own buffers, a save in the middle of an accumulation cycle
cannot keep them. It then keeps what stood before the cycle's first micro-batch was read, and the
run that loads it does these micro-batches again. Weights, optimizers and the scaler are as they
were until the next step; the rest is copied at every boundary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accelerate_core.accelerator import Accelerator

__all__ = ["Boundary"]


@dataclass(frozen=True)
class _Kept:
    state: Any

    def state_dict(self) -> Any:
        return self.state


class Boundary:
    """What of an Accelerator's state moves between two optimizer steps, as of the last boundary.

    Args:
        own_state: returns the positions, generators and counters of this rank.
    """

    def __init__(
        self, accelerator: Accelerator, own_state: Callable[[Accelerator], dict[str, Any]]
    ) -> None:
        self._accelerator = accelerator
        self._own_state = own_state
        self._counts = (-1, -1)
        self.own: dict[str, Any] = {}
        self._objects: dict[int, _Kept] = {}
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        accelerator.gradient_state.before_cycle = self.keep

    def keep(self) -> None:
        """Copy the state, if a cycle may begin here; a loop without gradients begins none."""
        accelerator, state = self._accelerator, self._accelerator.gradient_state
        if not state.sync_gradients or not torch.is_grad_enabled():
            return
        self._counts = (state.steps, state.backwards)
        self.own = copy.deepcopy(self._own_state(accelerator))
        self._objects = {
            id(one): _Kept(copy.deepcopy(one.state_dict()))
            for one in (*accelerator.schedulers, *accelerator.registered_objects)
        }
        self._buffers = [
            (buffer, buffer.detach().clone())
            for model in accelerator.models
            for buffer in accelerator.inner_model(model).buffers()
        ]

    def needed(self) -> bool:
        """Return whether a save now is in the middle of a cycle; say so once."""
        accelerator, state = self._accelerator, self._accelerator.gradient_state
        steps, backwards = self._counts
        begun = not state.sync_gradients or state.backwards > backwards
        if not begun or not accelerator.waiting_optimizers():
            return False
        since = state.backwards - backwards
        if state.steps != steps or not since:
            accelerator.note_once(
                f"The backend {accelerator.backend.name!r} cannot give gradients, and a save "
                "between a backward and its step that is not in an accumulate block over a "
                "prepared loader leaves them out: save after the step."
            )
            return False
        accelerator.note_once(
            f"The backend {accelerator.backend.name!r} cannot give the gradients of a begun "
            f"cycle: what is saved is the state of the last step boundary, {since} micro-batches "
            "ago, which are done again after loading."
        )
        return True

    def of(self, obj: Any) -> Any:
        """Return what has the state that a scheduler or registered object had; else itself."""
        return self._objects.get(id(obj), obj)

    @contextmanager
    def buffers(self) -> Iterator[None]:
        """Give the models the buffers of the boundary for a while."""
        now = [buffer.detach().clone() for buffer, _ in self._buffers]
        self._fill(kept for _, kept in self._buffers)
        try:
            yield
        finally:
            self._fill(iter(now))

    def _fill(self, values: Iterator[torch.Tensor]) -> None:
        with torch.no_grad():
            for (buffer, _), value in zip(self._buffers, values, strict=True):
                buffer.copy_(value)
