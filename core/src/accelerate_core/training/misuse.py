"""Loops that look right and train something else: each check looks once, and warns.

None of them costs anything once it has looked: they run at the first block of `accumulate`, at the
first two calls of `backward`, and when results of `prepare` are handed out.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accelerate_core.errors import of_the_user, warn
from accelerate_core.pickling import unwrapped
from accelerate_core.training.optimizer import AcceleratedOptimizer


class StepWatch:
    """Warns of an optimizer that steps in the middle of an accumulation cycle.

    Prepared optimizers do nothing there, so one that steps is not prepared.

    Args:
        prepared: the prepared optimizers.
    """

    def __init__(self, prepared: Sequence[AcceleratedOptimizer]) -> None:
        self._prepared = prepared
        self._handle = register_optimizer_step_pre_hook(self._note)

    def _note(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.end()
        kind = type(optimizer).__name__
        if any(optimizer is one.optimizer for one in self._prepared):
            which = f"the {kind} that prepare() was given, and not the one that it returned,"
        else:
            which = f"the {kind}, which was not prepared,"
        warn(
            f"accumulate(): {which} steps in every micro-batch, not once per cycle. "
            "Step the optimizer that accelerator.prepare(...) returns."
        )

    def end(self) -> None:
        """Stop watching."""
        self._handle.remove()


def warn_never_accumulated(steps: int) -> None:
    """Warn of losses that are divided for an accumulation that does not happen."""
    warn(
        f"gradient_accumulation_steps={steps} divides every loss by {steps}, but the optimizer steps "
        "after each backward: the loop never enters accelerator.accumulate(). Put its body into "
        "`with accelerator.accumulate(model):`, or leave gradient_accumulation_steps at 1."
    )


class NotCalled:
    """A hook on a backend's wrapper, until the wrapper is called for the first time.

    A pickle or a copy of the wrapper has a hook that does nothing in its place.
    """

    def __init__(self, wrapper: torch.nn.Module) -> None:
        self._handle = wrapper.register_forward_pre_hook(self)

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        self._handle.remove()

    def __reduce__(self) -> Any:
        return unwrapped, (_nothing,)


def _nothing(module: torch.nn.Module, args: Any) -> None:
    """Stand in a copy's place of `NotCalled`."""


def check_loss(loss: torch.Tensor, models: Sequence[torch.nn.Module]) -> None:
    """Warn of a loss whose gradients reach no prepared model, or one past its wrapper.

    Args:
        loss: before its backward.
        models: those that were prepared.
    """
    prepared = {id(one): (model, one) for model in models for one in model.parameters()}
    # Shards of parameters stand in the model, while the graph has the whole ones.
    if not prepared or any(hasattr(one, "device_mesh") for _, one in prepared.values()):
        return
    reached: torch.Tensor | None = None
    for parameter in _leaves(loss):
        if id(parameter) in prepared:
            _check_called(prepared[id(parameter)][0])
            return
        reached = parameter
    if reached is not None:
        names = ", ".join(sorted({type(model).__name__ for model in models}))
        warn(
            f"backward() got a loss that no prepared model ({names}) had a part in: its gradients go to "
            f"others, such as a parameter of shape {list(reached.shape)}. Compute the loss with the model "
            "that accelerator.prepare(...) returned."
        )


def _check_called(model: torch.nn.Module) -> None:
    if any(isinstance(hook, NotCalled) for hook in model._forward_pre_hooks.values()):
        kind = type(model).__name__
        warn(
            f"backward() got a loss of the model inside of the {kind} that prepare() returned, and the "
            f"{kind} itself was not called: ranks may not share its gradients. Call what "
            "accelerator.prepare(...) returned."
        )


def _leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that the gradients of a loss are collected in."""
    first = getattr(loss, "grad_fn", None)  # what is no tensor is refused by backward itself
    waiting: list[Any] = [] if first is None else [first]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            yield variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def warn_if_thrown_away(given: Iterable[Any], made: Iterable[Any]) -> None:
    """Warn if the statement that called `prepare` does nothing with what it returns.

    Nothing is lost where every object was prepared in place.
    """
    lost = [type(old).__name__ for old, new in zip(given, made, strict=True) if old is not new]
    if lost and _result_is_dropped():
        warn(
            f"The results of prepare() are thrown away: the script keeps using {', '.join(lost)} as "
            "before. Use what it returns: `model, optimizer, loader = accelerator.prepare(model, "
            "optimizer, loader)`."
        )


def _result_is_dropped() -> bool:
    """Tell whether the user's line that called a `prepare` of ours is a statement of its own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not of_the_user(frame):
        name = frame.f_code.co_name
        if not (name in ("_result_is_dropped", "warn_if_thrown_away", "call") or "prepare" in name):
            return False  # another function of ours prepares, and keeps what it gets
        frame = frame.f_back
    if frame is None:
        return False
    rest = (one for one in dis.get_instructions(frame.f_code) if one.offset > frame.f_lasti)
    following = next(rest, None)
    return following is not None and following.opname == "POP_TOP"
