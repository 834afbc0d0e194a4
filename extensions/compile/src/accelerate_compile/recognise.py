"""Recognise compiled modules, layers of torch, and wrappers of torch."""

from __future__ import annotations

from torch import nn

from accelerate_core.plugin import is_compiled_in_place, is_torch_layer, is_wrapped


def is_compiled_module(module: object) -> bool:
    """Return whether the whole module is compiled, by `torch.compile` or in place."""
    return isinstance(module, nn.Module) and (
        is_wrapped(module)
        or is_compiled_in_place(module)
        or is_compiled_in_place(within_wrappers(module))
    )


def within_wrappers(module: nn.Module) -> nn.Module:
    """Return the module inside torch's own wrappers, which torch's compiler doesn't enter."""
    while _forward_module(module).startswith("torch.") and not is_torch_layer(module):
        children = list(module.children())
        if len(children) != 1 or is_wrapped(module):
            break
        module = children[0]
    return module


def _forward_module(module: nn.Module) -> str:
    return str(getattr(module.forward, "__module__", "") or "")
