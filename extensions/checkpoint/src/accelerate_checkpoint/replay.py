"""The state of the last step boundary, for backends that cannot give the gradients of a cycle.

Where gradients are in a backend's own buffers, a save in the middle of an accumulation cycle
cannot keep them. It then keeps what stood before the cycle's first micro-batch was read, and the
run that loads it does these micro-batches again. Weights, optimizers and the scaler are as they
were until the next step; the rest is copied at every boundary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accelerate_checkpoint.training_state import TrainingState


class CycleStart:
    """What moves between two optimizer steps, as it stood before the cycle that has begun."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._counts = (-1, -1)
        self.rank_state: dict[str, Any] = {}
        self._states: dict[int, Any] = {}
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        state.events.before_cycle = self.capture

    def capture(self) -> None:
        """Copy the state, if a cycle may begin here; a loop without gradients begins none."""
        state, events = self._state, self._state.events
        if not events.sync_gradients or not torch.is_grad_enabled():
            return
        self._counts = (events.steps, events.backwards)
        self.rank_state = copy.deepcopy(state.rank_state())
        self._states = {
            id(one): copy.deepcopy(one.state_dict())
            for one in (*state.schedulers, *state.registered)
        }
        self._buffers = [
            (buffer, buffer.detach().clone())
            for model in state.models
            for buffer in state.inner(model).buffers()
        ]

    def needed(self) -> bool:
        """Return whether a save now is in the middle of a cycle; say so once."""
        state, events = self._state, self._state.events
        steps, backwards = self._counts
        begun = not events.sync_gradients or events.backwards > backwards
        if not begun or not state.waiting():
            return False
        since = events.backwards - backwards
        if events.steps != steps or not since:
            state.note_once(
                f"The backend {state.backend!r} cannot give gradients, and a save "
                "between a backward and its step that is not in an accumulate block over a "
                "prepared loader leaves them out: save after the step."
            )
            return False
        state.note_once(
            f"The backend {state.backend!r} cannot give the gradients of a begun "
            f"cycle: what is saved is the state of the last step boundary, {since} micro-batches "
            "ago, which are done again after loading."
        )
        return True

    def state_of(self, obj: Any) -> Any:
        """Return the state that a scheduler or registered object had; of others, the present."""
        return self._states[id(obj)] if id(obj) in self._states else obj.state_dict()

    @contextmanager
    def buffers(self) -> Iterator[None]:
        """Give the models the buffers of that moment for a while."""
        now = [(buffer, buffer.detach().clone()) for buffer, _ in self._buffers]
        _fill(self._buffers)
        try:
            yield
        finally:
            _fill(now)


@torch.no_grad()
def _fill(values: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for buffer, value in values:
        buffer.copy_(value)
