"""The optimizer that `prepare` returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer

from accelerate_core.pickling import unwrapped
from accelerate_core.training.gradient_state import GradientState
from accelerate_core.training.loss_scaler import LossScaler


class SkipWatch(Protocol):
    """Watches the steps of an optimizer after one that was reported as skipped."""

    #: Whether the next step is watched.
    armed: bool

    def before_step(self, optimizer: Any) -> None:
        """Called before a step that is watched."""

    def after_step(self, skipped: bool) -> None:
        """Called after a step that was watched or reported as skipped."""


class OptimizerHooks(Protocol):
    """The hooks of a backend that step an optimizer."""

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any] | None) -> bool:
        """Step the inner optimizer; return False if the step was skipped (overflow)."""

    def zero_grad(self, optimizer: Any, set_to_none: bool) -> None:
        """Clear the gradients of the inner optimizer's parameters."""


class AcceleratedOptimizer(Optimizer):
    """An optimizer whose `step` and `zero_grad` do nothing inside an accumulation cycle.

    Before the backward of a micro-batch, `zero_grad` only clears gradients from before the cycle.

    All other attributes come from the inner optimizer, `optimizer`.

    Args:
        optimizer: the optimizer to wrap.
        gradient_state: tells whether to step now.
        hooks: the backend's `optimizer_step` and `zero_grad`.
        loss_scaler: updates the scale after each step; None if losses are not scaled.
        after_step: called after each step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        gradient_state: GradientState,
        hooks: OptimizerHooks,
        loss_scaler: LossScaler | None = None,
        after_step: Callable[[Any], None] | None = None,
    ) -> None:
        # Optimizer.__init__ is not called, because groups and state stay in the inner optimizer.
        self.optimizer = optimizer
        self.gradient_state = gradient_state
        self._hooks = hooks
        self._loss_scaler = loss_scaler
        self._after_step = after_step
        self._was_skipped = False
        #: Watches steps that the backend reports as skipped; None if nothing does.
        self.skip_watch: SkipWatch | None = None
        #: The number of steps, and of backward passes before the last step.
        self.steps_taken = 0
        self.seen_backwards = 0
        # Micro-batch of the last call of `zero_grad`, and the number of backward passes before it.
        self._zeroed_in = 0
        self._zeroed_at = 0
        # The number of backward passes before the gradients were last cleared.
        self._cleared_at = 0
        # Whether `zero_grad` was called before the last backward whose micro-batch called `step`.
        self._zeroes_first = False
        #: What `call_after_step` registered, and the number of the next step that calls something.
        self._calls: list[tuple[int, Callable[[AcceleratedOptimizer], None]]] = []
        self._next_call = math.inf

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet: unpickling, copying
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def __reduce__(self) -> Any:
        # State of this run is not pickled; a pickle or a copy contains the user's own optimizer.
        return unwrapped, (self.optimizer,)

    @property
    def state(self) -> Any:
        """State per parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups with their hyperparameters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def defaults(self) -> dict[str, Any]:
        """Default hyperparameters of groups."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.optimizer.defaults = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the inner optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the inner optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, but not those that an accumulation cycle still needs.

        Before the backward of a micro-batch, only gradients from before the cycle are cleared. After it,
        all gradients are cleared, but only in the last micro-batch of a cycle.

        Args:
            set_to_none: drop the gradients instead of filling them with zeros.
        """
        state = self.gradient_state
        clears = state.sync_gradients
        # In a micro-batch with several losses, the backward of another optimizer's loss may come first.
        if state.micro_batch_start is not None and (
            state.micro_batch_start == state.backwards
            or (self._zeroes_first and self._zeroed_in != state.micro_batches)
        ):
            clears = self._clears_before_backward(state.micro_batch_start)
        self._zeroed_in = state.micro_batches
        self._zeroed_at = state.backwards
        if clears:
            self._cleared_at = state.backwards
            self._hooks.zero_grad(self.optimizer, set_to_none)

    def _clears_before_backward(self, micro_batch_start: int) -> bool:
        """Return whether `zero_grad` clears gradients when a micro-batch has not added to them yet."""
        state = self.gradient_state
        if micro_batch_start > state.cycle_start and self.seen_backwards < state.backwards:
            # Earlier micro-batches of this cycle have gradients that no step has used.
            if state.sync_gradients and state.gradients_kept is not None:
                state.gradients_kept(state)
            return False
        return state.sync_gradients or self._cleared_at < state.cycle_start

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, at the boundary of an accumulation cycle only; return the result of the closure."""
        state = self.gradient_state
        self._zeroes_first = (
            self._zeroed_in == state.micro_batches and self._zeroed_at < state.backwards
        )
        if not state.sync_gradients:
            return None
        result: list[Any] = []
        if closure is not None:
            inner = closure

            def closure() -> Any:
                result.append(inner())
                return result[-1]

        skips = self.skip_watch
        if skips is not None and skips.armed:
            skips.before_step(self.optimizer)
        self._was_skipped = not self._hooks.optimizer_step(self.optimizer, closure)
        if skips is not None and (self._was_skipped or skips.armed):
            skips.after_step(self._was_skipped)
        if self._loss_scaler is not None:
            self._loss_scaler.note_step(self.optimizer)
        self.steps_taken += not self._was_skipped
        self.seen_backwards = state.backwards
        state.steps += 1
        if self._after_step is not None:
            self._after_step(self)
        if self.steps_taken >= self._next_call:
            self._run_calls()
        return result[-1] if result else None

    def call_after_step(self, step: int, function: Callable[[AcceleratedOptimizer], None]) -> None:
        """Call a function with this optimizer once, at the end of a step.

        Other steps make no additional call. Another thread may register a function, too.

        Args:
            step: the number of the step. If it has passed, the function is called after the next one.
            function: what to call.
        """
        self._calls.append((step, function))
        self._next_call = min(self._next_call, step)

    def _run_calls(self) -> None:
        due = [one for one in self._calls if one[0] <= self.steps_taken]
        for one in due:
            self._calls.remove(one)
        self._next_call = min((step for step, _ in self._calls), default=math.inf)
        for _, function in due:
            function(self)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because a gradient overflowed."""
        return self._was_skipped

    def train(self) -> None:
        """Pass on to optimizers that have modes, such as schedule-free ones."""
        getattr(self.optimizer, "train", lambda: None)()

    def eval(self) -> None:
        """Pass on to optimizers that have modes, such as schedule-free ones."""
        getattr(self.optimizer, "eval", lambda: None)()
