"""Warn about loops that look right but train something else.

Each check runs once: in the first `accumulate` block, in the first two calls of `backward`, or when
`prepare` returns. Later steps cost nothing.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accelerate_core.errors import ConfigurationError, of_the_user, warn
from accelerate_core.pickling import unwrapped
from accelerate_core.training.optimizer import AcceleratedOptimizer


class StepWatch:
    """Warns about an optimizer that steps in the middle of an accumulation cycle.

    Prepared optimizers do nothing there, so an optimizer that steps is not prepared.

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


def warn_never_accumulated(steps: int) -> None:
    """Warn that losses are divided for an accumulation that does not happen."""
    warn(
        f"gradient_accumulation_steps={steps} divides every loss by {steps}, but the optimizer steps "
        "after each backward, because the loop never enters accelerator.accumulate(). Put its body "
        "into `with accelerator.accumulate(model):`, or set gradient_accumulation_steps to 1."
    )


class NotCalled:
    """A hook on a backend's wrapper that removes itself when the wrapper is called.

    In a pickle or a copy of the wrapper, a hook that does nothing replaces it.
    """

    def __init__(self, wrapper: torch.nn.Module) -> None:
        self._handle = wrapper.register_forward_pre_hook(self)

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        self._handle.remove()

    def __reduce__(self) -> Any:
        return unwrapped, (_nothing,)


def _nothing(module: torch.nn.Module, args: Any) -> None:
    """Replace `NotCalled` in copies."""


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


def refuse_replaced(
    parameters: Iterable[torch.Tensor], replaced: Mapping[torch.Tensor, tuple[Any, str]]
) -> None:
    """Refuse to clip parameters that `prepare` replaced, because those have no gradients.

    Args:
        parameters: the parameters to clip.
        replaced: replaced parameter -> (prepared model, name).

    Raises:
        ConfigurationError: the message has the name of one.
    """
    names = [replaced[one][1] for one in parameters if one in replaced]
    if names:
        raise ConfigurationError(
            f"Gradient clipping got {len(names)} parameter(s) from before prepare(), such as "
            f"{names[0]!r}. The backend replaced them, so they have no gradients. Pass the "
            "parameters of the model that accelerator.prepare(...) returned."
        )


def warn_if_thrown_away(given: Iterable[Any], made: Iterable[Any]) -> None:
    """Warn if the statement that called `prepare` ignores its result.

    The result is not needed if all objects were prepared in place.
    """
    lost = [type(old).__name__ for old, new in zip(given, made, strict=True) if old is not new]
    if lost and _result_is_dropped():
        warn(
            f"The results of prepare() are ignored, so the script keeps using the unprepared "
            f"{', '.join(lost)}. Assign them: `model, optimizer, loader = accelerator.prepare(model, "
            "optimizer, loader)`."
        )


def _result_is_dropped() -> bool:
    """Return whether the user's line that called `prepare` is a statement that drops the result."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not of_the_user(frame):
        name = frame.f_code.co_name
        if not (name in ("_result_is_dropped", "warn_if_thrown_away", "call") or "prepare" in name):
            return False  # another function of this package called prepare, and keeps the result
        frame = frame.f_back
    if frame is None:
        return False
    rest = (one for one in dis.get_instructions(frame.f_code) if one.offset > frame.f_lasti)
    following = next(rest, None)
    return following is not None and following.opname == "POP_TOP"
