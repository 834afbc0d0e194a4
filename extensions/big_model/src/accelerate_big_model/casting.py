"""Small storage, larger computing dtype, layer by layer."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from accelerate_big_model.hooks import LayerwiseCastingHook, add_hook_to_module

__all__ = ["attach_layerwise_casting_hooks"]


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Iterable[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store linear layers and convolutions in one dtype and compute them in another.

    For inference with, say, `torch.float8_e4m3fn` weights and bfloat16 arithmetic.

    Args:
        module: the model.
        storage_dtype: of the weights between forwards.
        compute_dtype: of the weights during a layer's forward; inputs must have it.
        skip_modules_pattern: regular expressions, searched for in full names; with all that
            is inside, a module that matches is left alone. Norms are best named here.
        skip_modules_classes: classes left alone, with all that is inside.
        non_blocking: do not wait for the casts.

    Example:
        >>> attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.bfloat16, "head")
    """
    patterns = (
        (skip_modules_pattern,)
        if isinstance(skip_modules_pattern, str)
        else tuple(skip_modules_pattern or ())
    )
    queue = [("", module)]
    while queue:
        name, current = queue.pop()
        if isinstance(current, skip_modules_classes or ()):
            continue
        if any(re.search(pattern, name) for pattern in patterns):
            continue
        if isinstance(current, (nn.Linear, _ConvNd)):
            hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
            add_hook_to_module(current, hook, append=True)
            continue
        queue += [(f"{name}.{n}" if name else n, child) for n, child in current.named_children()]
