"""Run a model's forward in mixed precision, without changing the model's class."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from accelerate_core.distributed.tree import convert_to_fp32
from accelerate_core.pickling import unwrapped

_HALVES = (torch.float16, torch.bfloat16)


class MixedForward:
    """A model's `forward` under autocast, optionally with outputs converted to fp32.

    It refers to its module, so a deep copy of the model gets its own wrapper, and a pickle contains
    the plain forward.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        function: Callable[..., Any],
        context: Callable[[], AbstractContextManager[Any]],
        upcast: bool,
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self._module = module
        self._function = function
        self._context = context
        self._upcast = upcast

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._context():
            output = self._function(self._module, *args, **kwargs)
        if not self._upcast:
            return output
        if type(output) is torch.Tensor and output.dtype in _HALVES:
            return output.float()  # the common case, without walking a structure
        return convert_to_fp32(output)

    def __deepcopy__(self, memo: dict[int, Any]) -> MixedForward:
        import copy

        module = copy.deepcopy(self._module, memo)
        return MixedForward(module, self._function, self._context, self._upcast)

    def __reduce__(self) -> Any:
        patched = vars(self._module).get("_unprepared_forward")
        return (unwrapped, (patched,)) if patched else (_bound, (self._function, self._module))

    @property
    def __signature__(self) -> Any:
        import inspect

        return inspect.signature(types.MethodType(self._function, self._module))


def _bound(function: Callable[..., Any], module: torch.nn.Module) -> Any:
    return types.MethodType(function, module)


def wrap_forward(
    model: torch.nn.Module, context: Callable[[], AbstractContextManager[Any]], upcast: bool
) -> None:
    """Run `model.forward` in a context. A second call replaces the first context.

    Args:
        upcast: convert half precision outputs to fp32.
    """
    unwrap_forward(model)
    own = vars(model).get("forward")
    if own is None:
        function: Callable[..., Any] = type(model).forward
    else:
        # The instance has a patched forward, which stays inside.
        def function(_: Any, *args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs)

        functools.update_wrapper(function, own, updated=())
        model._unprepared_forward = own
    model.forward = MixedForward(model, function, context, upcast)


def unwrap_forward(model: torch.nn.Module) -> None:
    """Undo `wrap_forward`."""
    if isinstance(vars(model).get("forward"), MixedForward):
        del model.forward
        own = vars(model).pop("_unprepared_forward", None)
        if own is not None:
            model.forward = own
