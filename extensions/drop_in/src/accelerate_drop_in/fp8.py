"""Accelerate's helpers for 8-bit training that don't need the fp8 plugin."""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from importlib.util import find_spec
from typing import Any, Literal, TypeVar

from torch import nn

from accelerate_core.plugin import MissingPluginError
from accelerate_drop_in.enums import EnumWithContains

_F = TypeVar("_F", bound=Callable[..., Any])

AmaxComputeAlgorithm = Literal["max", "most_recent"]
FP8Format = Literal["HYBRID", "E4M3", "E5M2"]
OptLevel = Literal["O1", "O2"]


class FP8BackendType(str, Enum, metaclass=EnumWithContains):  # noqa: UP042
    """The library that computes in 8 bits. Each member equals its string."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of a model's first and last linear layers, which stay in 16 bits."""
    names = [name for name, one in model.named_modules() if isinstance(one, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: list[str]) -> bool:
    """Return whether a layer may compute in 8 bits: its sizes are divisible by 16 and it isn't excluded."""
    if isinstance(module, nn.Linear) and (module.in_features % 16 or module.out_features % 16):
        return False
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Return whether a layer may compute in 8 bits; the first and the last linear layers may not.

    Args:
        module: the model.
        fqn: the full name of the layer.
    """
    ends = [name for name in find_first_last_linear_layers(module) if name is not None]
    return filter_linear_layers(module, fqn, ends)


def has_ao_layers(model: nn.Module) -> bool:
    """Return whether a model has linear layers from torchao, without importing torchao."""
    return any(type(one).__module__.startswith("torchao.") for one in model.modules())


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Return whether a model has layers from Transformer Engine, without importing it."""
    kinds = {base for one in model.modules() for base in type(one).__mro__}
    return any(kind.__module__.startswith("transformer_engine.") for kind in kinds)


def torchao_required(func: _F) -> _F:
    """Decorate a function that needs torchao.

    Raises:
        MissingPluginError: the function is called and torchao is not installed.
    """

    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if find_spec("torchao") is None:
            raise MissingPluginError(
                f"{func.__name__}() needs torchao. Install it with: pip install torchao"
            )
        return func(*args, **kwargs)

    return checked  # type: ignore[return-value]
