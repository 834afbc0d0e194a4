"""Recognise loops that train something else than they seem to. `loop_checks` calls this."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accelerate_core.plugin import (
    AcceleratorView,
    PreparedOptimizer,
    of_the_user,
    uncompiled,
    warn,
)


class StepWatch:
    """Warns about an optimizer that steps in the middle of an accumulation cycle.

    Prepared optimizers do nothing there, so an optimizer that steps is not prepared.

    Args:
        prepared: the prepared optimizers.
    """

    def __init__(self, prepared: Sequence[PreparedOptimizer]) -> None:
        self._prepared = prepared
        self._warned = False
        # torch iterates over these hooks, so this one is removed at the end of the block.
        self._handle = register_optimizer_step_pre_hook(self._note)

    def _note(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._warned:
            return
        self._warned = True
        kind = type(optimizer).__name__
        if any(optimizer is one.optimizer for one in self._prepared):
            which = f"the {kind} that was passed to prepare(), not the one that it returned,"
        else:
            which = f"the {kind}, which was not prepared,"
        warn(
            f"accumulate(): {which} steps in every micro-batch instead of once per cycle. "
            "Step the optimizer that accelerator.prepare(...) returns."
        )

    def end(self) -> None:
        """Stop watching."""
        self._handle.remove()


class NotCalled:
    """A hook on a backend's wrapper that removes itself when the wrapper is called.

    In a pickle or a copy of the wrapper, a hook that does nothing replaces it.
    """

    def __init__(self, wrapper: torch.nn.Module) -> None:
        self._handle = wrapper.register_forward_pre_hook(self)

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        self._handle.remove()

    def __reduce__(self) -> Any:
        return _make_nothing, ()


def _make_nothing() -> Callable[..., None]:
    return _nothing


def _nothing(module: torch.nn.Module, args: Any) -> None:
    """Replace `NotCalled` in copies."""


def is_wrapper(accelerator: AcceleratorView, model: torch.nn.Module) -> bool:
    """Return whether the backend wrapped a model that is trained in its own module, without compiling it."""
    if uncompiled(model) is not model or all(model is not one for one in accelerator.models):
        return False
    if model._compiled_call_impl is not None:
        return False  # adding and removing a hook would recompile it
    return accelerator.hooks.unwrap_model(model) is not model


def check_loss(loss: torch.Tensor, models: Sequence[torch.nn.Module]) -> None:
    """Warn about a loss whose gradients reach no prepared model, or bypass its wrapper.

    Args:
        loss: the loss, before backward.
        models: the prepared models.
    """
    prepared = {id(one): (model, one) for model in models for one in model.parameters()}
    # The model holds shards of parameters, while the graph holds whole ones.
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
            f"backward() got a loss that does not depend on a prepared model ({names}). Its gradients "
            f"reach other parameters, such as one of shape {list(reached.shape)}. Compute the loss with "
            "the model that accelerator.prepare(...) returned."
        )


def _check_called(model: torch.nn.Module) -> None:
    if any(isinstance(hook, NotCalled) for hook in model._forward_pre_hooks.values()):
        kind = type(model).__name__
        warn(
            f"backward() got a loss of the model inside the {kind} that prepare() returned, but the "
            f"{kind} itself was not called, so ranks may not share its gradients. Call the model that "
            "accelerator.prepare(...) returned."
        )


def _leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the leaf tensors that receive gradients from a loss."""
    first = getattr(loss, "grad_fn", None)  # backward itself raises for anything but a tensor
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


#: Functions between `prepare` and `result_is_dropped`, besides those with "prepare" in their name.
_CALLING_HOOKS = {"result_is_dropped", "traced", "__call__", "<listcomp>", "call_each", "call"}


def result_is_dropped() -> bool:
    """Return whether the user's line that called `prepare` is a statement that drops the result."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not of_the_user(frame):
        name = frame.f_code.co_name
        if name not in _CALLING_HOOKS and "prepare" not in name:
            return False  # another function of our packages called prepare, and keeps the result
        frame = frame.f_back
    if frame is None:
        return False
    rest = (one for one in dis.get_instructions(frame.f_code) if one.offset > frame.f_lasti)
    following = next(rest, None)
    return following is not None and following.opname == "POP_TOP"
