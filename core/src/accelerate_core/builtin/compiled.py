"""Remove the compilation from models."""

from __future__ import annotations

import sys
import types
from typing import Any, cast

from torch import nn

_PREFIX = "_orig_mod."


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module that `torch.compile(module)` wrapped, or `model` itself."""
    while is_wrapped(model):
        model = cast(nn.Module, model._orig_mod)
    return model


def strip_compiled(model: nn.Module) -> nn.Module:
    """Return the model without compilation, with the same parameters and buffers.

    If nothing is compiled, this is `model` itself. Otherwise it is a new module of the same class that
    shares all tensors, so training one trains the other. `train()`, `eval()` and new submodules affect
    only one of them. `model` stays compiled.
    """
    return _strip(model, {})


def canonical_key(name: str) -> str:
    """Remove the prefix `_orig_mod.` that `torch.compile` adds to parameter names."""
    if _PREFIX not in name:
        return name
    return ".".join(part for part in name.split(".") if part != _PREFIX[:-1])


def is_wrapped(module: object) -> bool:
    """Return whether an object was returned by `torch.compile(module)`."""
    # Reading `torch._dynamo` would import the compiler, even if nothing is ever compiled.
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and isinstance(module, frames.OptimizedModule)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether a module was compiled with `Module.compile`."""
    return getattr(module, "_compiled_call_impl", None) is not None


def _strip(module: nn.Module, done: dict[int, nn.Module]) -> nn.Module:
    if id(module) in done:
        return done[id(module)]
    inner = uncompiled(module)
    if not any(is_wrapped(part) or is_compiled_in_place(part) for part in inner.modules()):
        done[id(module)] = inner
        return inner
    # Some backends give the class a `__new__` that returns another class.
    view = object.__new__(inner.__class__)
    done[id(module)] = view
    done[id(inner)] = view
    state = {name: value for name, value in vars(inner).items() if name != "_compiled_call_impl"}
    # Both share the dictionaries of parameters and buffers, so rebinding a parameter affects both.
    state["_modules"] = {
        name: None if child is None else _strip(child, done)
        for name, child in inner._modules.items()
    }
    view.__dict__.update({name: _rebound(value, inner, view) for name, value in state.items()})
    return view


def _rebound(value: Any, old: nn.Module, new: nn.Module) -> Any:
    """Point a method that was set on the instance (a patched `forward`) at the view."""
    if isinstance(value, types.MethodType) and value.__self__ is old:
        return types.MethodType(value.__func__, new)
    return value
