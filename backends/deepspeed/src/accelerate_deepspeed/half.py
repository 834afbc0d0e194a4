"""DeepSpeed's own half precision: what goes into a module and comes out, and the loss scale."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate_core.distributed.tree import convert_to_fp32, map_tensors
from accelerate_core.errors import ConfigurationError

if TYPE_CHECKING:
    from accelerate_deepspeed.boundary import Boundary

__all__ = ["agree_on_scale", "dtype_of", "mend_stage_0", "wrap_module"]


def dtype_of(engine: Any) -> torch.dtype | None:
    """Return the dtype DeepSpeed has cast the parameters to, None where it has not."""
    if engine.fp16_enabled():
        return torch.float16
    return torch.bfloat16 if engine.bfloat16_enabled() else None


def wrap_module(engine: Any, cast_inputs: bool, upcast: bool) -> None:
    """Cast floating tensors among a module's arguments to its dtype, outputs to fp32.

    Hooks of the module, so that it is so whether the engine or the module is called.

    Args:
        cast_inputs: False leaves arguments as they are.
        upcast: False leaves outputs as they are.
    """
    dtype = dtype_of(engine)
    if dtype is None:
        return
    if engine.fp16_enabled():
        # DeepSpeed's own passes over keyword arguments, and cannot rebuild a named tuple.
        engine._config.float16_config.auto_cast = False
    if cast_inputs:
        cast = partial(_cast, dtype)
        engine.module.register_forward_pre_hook(cast, prepend=True, with_kwargs=True)
    if upcast:
        engine.module.register_forward_hook(_upcast)


def _cast(
    dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    made: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(
        lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, (args, kwargs)
    )
    return made


def _upcast(module: nn.Module, args: Any, output: Any) -> Any:
    return convert_to_fp32(output)


def mend_stage_0(engine: Any) -> None:
    """Undo the step with zero gradients that DeepSpeed takes before the first one at stage 0.

    It has made the weights decay and counted in Adam's correction; the module has not seen it yet.
    """
    engine.optimizer.refresh_fp32_params()
    engine.basic_optimizer.state.clear()


def agree_on_scale(boundaries: Sequence[Boundary]) -> None:
    """Give engines that one loss goes through one scale: a static one, else the smallest.

    Gradients that are there already are brought to it.

    Raises:
        ConfigurationError: two engines have different static scales.
    """
    if len({boundary.loss_scale for boundary in boundaries}) <= 1:
        return
    static = {one.loss_scale for one in boundaries if not one.dynamic}
    if len(static) > 1:
        raise ConfigurationError(
            f"One loss goes through engines with the static scales {sorted(static)}: give their "
            "DeepSpeed configs the same fp16.loss_scale, or 0."
        )
    scale = min(static or {one.loss_scale for one in boundaries})
    for one in boundaries:
        if one.dirty:
            one.scale(torch.tensor(scale / one.loss_scale))
        one.engine.optimizer.loss_scale = scale
