"""Parameters in parts, whole for a moment."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn


class GatheredParameters:
    """Have parameters whole inside of the block, whatever the stage; nothing where they are.

    Args:
        params: parameters, or one.
        modifier_rank: the rank whose changes the others get; None: they are not changed.
        fwd_module: as in deepspeed.
        enabled: False does nothing.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        held = [params] if hasattr(params, "shape") else list(params)
        self._context: AbstractContextManager[Any] = nullcontext()
        if enabled and any(hasattr(parameter, "ds_id") for parameter in held):
            import deepspeed

            self._context = deepspeed.zero.GatheredParameters(
                held, modifier_rank=modifier_rank, fwd_module=fwd_module
            )

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
