"""Autocast and the global state of a process."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from transformer_engine.common.recipe import DelayedScaling, Recipe

#: Compute capability of the simulated device.
CAPABILITY = (9, 0)
#: The group of each reduction of maximum values, and the arguments of each entered autocast.
REDUCED: list[Any] = []
ENTERED: list[tuple[bool, Any, Any]] = []


def _answer(can: bool, reason: str, return_reason: bool) -> Any:
    return (can, "" if can else reason) if return_reason else can


def is_fp8_available(return_reason: bool = False) -> Any:
    reason = "Device compute capability 8.9 or higher required for FP8 execution."
    return _answer(CAPABILITY >= (8, 9), reason, return_reason)


def is_mxfp8_available(return_reason: bool = False) -> Any:
    reason = "Device compute capability 10.0 or higher required for MXFP8 execution."
    return _answer(CAPABILITY >= (10, 0), reason, return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> Any:
    reason = "FP8 block scaled GEMM requires compute capability 9.0 or higher and CUDA >= 12.9."
    return _answer(CAPABILITY >= (9, 0), reason, return_reason)


def is_nvfp4_available(return_reason: bool = False) -> Any:
    reason = "Device compute capability 10.0 or higher required for NVFP4 execution."
    return _answer(CAPABILITY >= (10, 0), reason, return_reason)


class FP8GlobalState:
    def __init__(self) -> None:
        self.fp8_enabled = False
        self.fp8_recipe: Recipe | None = None
        self.fp8_distributed_group: Any = None
        self.fp8_parameters = False
        self.autocast_depth = 0
        self.states: list[tuple[Any, Recipe, Any]] = []  # forward's, with recipe and group
        self.recompute = ""  # "first" or "second" forward of a checkpoint


class FP8GlobalStateManager:
    quantization_state = FP8GlobalState()

    @classmethod
    def reset(cls) -> None:
        cls.quantization_state = FP8GlobalState()

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        for state, recipe, group in cls.quantization_state.states:
            largest = state.amax_history[0]
            if recipe.reduce_amax and dist.is_initialized() and dist.get_world_size(group) > 1:
                REDUCED.append(group)
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            last = recipe.amax_compute_algo == "most_recent"
            amax = largest.clone() if last else state.amax_history.amax(0)
            state.amax_history.copy_(state.amax_history.roll(-1, 0))
            state.amax_history[0].zero_()
            maximum = recipe.fp8_format.value.max_fwd / 2**recipe.margin
            state.scale.copy_(torch.where(amax > 0, maximum / amax, state.scale))


class autocast:
    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        self._given = enabled, recipe, amax_reduction_group

    def __enter__(self) -> autocast:
        state = FP8GlobalStateManager.quantization_state
        self._before = state.fp8_enabled, state.fp8_recipe, state.fp8_distributed_group
        state.fp8_enabled, state.fp8_recipe, state.fp8_distributed_group = self._given
        state.autocast_depth += 1
        ENTERED.append(self._given)
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        state = FP8GlobalStateManager.quantization_state
        state.fp8_enabled, state.fp8_recipe, state.fp8_distributed_group = self._before
        state.autocast_depth -= 1
        if self._given[0] and state.autocast_depth == 0 and torch.is_grad_enabled():
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)


@contextmanager
def quantized_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> Any:
    state = FP8GlobalStateManager.quantization_state
    before, state.fp8_parameters = state.fp8_parameters, enabled
    try:
        yield
    finally:
        state.fp8_parameters = before


class DelayedScalingRecipeState:
    def __init__(self, recipe: DelayedScaling, *, mode: str, num_quantizers: int = 1) -> None:
        self.recipe = recipe
        self.scale = torch.ones(num_quantizers)
        self.amax_history = torch.zeros(recipe.amax_history_len, num_quantizers)
        self.stashed: deque[torch.Tensor] = deque()
