"""Gather partitioned parameters temporarily."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn


class GatheredParameters:
    """A context in which parameters are whole. It has no effect if they are not partitioned.

    Args:
        params: one parameter or several.
        modifier_rank: the rank whose changes are sent to the others. None discards changes.
        fwd_module: see `deepspeed.zero.GatheredParameters`.
        enabled: False turns the context off.
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
