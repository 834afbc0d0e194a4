"""Layers, and everything that the package exports."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from transformer_engine.pytorch.quantization import (  # noqa: F401
    DelayedScalingRecipeState,
    FP8GlobalStateManager,
    autocast,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)

#: Options of every call of `checkpoint`.
CHECKPOINTED: list[dict[str, Any]] = []


def _rounded(value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Round to fp8. Gradients pass unchanged."""
    inside = (value.detach() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(value.dtype)
    return value + (inside / scale.to(value.dtype) - value).detach()


class QuantizedTensor(torch.Tensor):
    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).to(dtype or self.dtype)


class TransformerEngineBaseModule(nn.Module):
    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {}
        self.fp8_initialized = False
        self.fp8_meta_tensors_initialized = False
        self.primary_weights_in_fp8 = FP8GlobalStateManager.quantization_state.fp8_parameters
        self.tp_size = 1

    def init_fp8_meta_tensors(self, recipe: Any) -> None:
        if recipe.delayed() and not self.fp8_meta_tensors_initialized:
            for side, each in (("scaling_fwd", 3), ("scaling_bwd", 2)):
                self.fp8_meta[side] = DelayedScalingRecipeState(
                    recipe, mode=side, num_quantizers=self.fp8_meta["num_gemms"] * each
                )
        self.fp8_meta_tensors_initialized = True

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        state = FP8GlobalStateManager.quantization_state
        self.fp8 = state.fp8_enabled
        if not self.fp8 or self.fp8_initialized:
            return
        self.fp8_meta.update(recipe=state.fp8_recipe, num_gemms=num_gemms)
        self.init_fp8_meta_tensors(state.fp8_recipe)
        self.fp8_initialized = True
        if state.fp8_recipe.delayed():
            own = self.fp8_meta["scaling_fwd"]
            state.states.append((own, state.fp8_recipe, state.fp8_distributed_group))

    def get_extra_state(self) -> torch.Tensor:
        if "scaling_fwd" not in self.fp8_meta:
            return torch.empty(0, dtype=torch.uint8)
        scale = self.fp8_meta["scaling_fwd"].scale
        return torch.frombuffer(bytearray(pickle.dumps({"scale_fwd": scale})), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        raise AssertionError("a pickle would be read")


class Linear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[..., Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        self.weight_names = ["weight"]
        options: dict[str, Any] = {"device": device, "dtype": params_dtype}
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **options))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, **options))
        else:
            self.bias = torch.Tensor().to(**options)
        if torch.device(device).type == "meta":
            return
        init_method = init_method or nn.init.normal_
        init_method(self.weight)
        if self.primary_weights_in_fp8:
            held = _rounded(self.weight.detach(), torch.tensor(64.0)).as_subclass(QuantizedTensor)
            self.weight = nn.Parameter(held)

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        kind = inp.device.type
        if torch.is_autocast_enabled(kind):
            inp = inp.to(torch.get_autocast_dtype(kind))
        weight, bias = self.weight, self.bias if self.use_bias else None
        if isinstance(weight, QuantizedTensor):
            weight = weight.dequantize()
        self.init_fp8_metadata()
        if not self.fp8:
            return F.linear(inp, weight, bias)
        if inp[..., 0].numel() % 8 or any(size % 16 for size in weight.shape):
            raise ValueError("FP8 execution requires the product of all dimensions ...")
        if self.fp8_meta["recipe"].delayed():
            scale = self._delayed(inp, weight)
        else:
            scale = 448 / torch.stack([one.detach().abs().amax().float() for one in (inp, weight)])
        out = F.linear(_rounded(inp, scale[0]), _rounded(weight, scale[1]), bias)
        if self.fp8_meta["recipe"].delayed() and out.requires_grad:
            history = self.fp8_meta["scaling_bwd"].amax_history
            out.register_hook(
                lambda grad: history[0, :1].copy_(grad.detach().abs().amax()) and None
            )
        return out

    def _delayed(self, inp: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        state = self.fp8_meta["scaling_fwd"]
        phase = FP8GlobalStateManager.quantization_state.recompute
        if phase == "second":
            return state.stashed.popleft()
        for index, one in enumerate((inp, weight)):
            state.amax_history[0, index] = one.detach().abs().amax()
        if phase == "first":
            state.stashed.append(state.scale.clone())
        return state.scale.clone()


class LayerNorm(nn.Module):
    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        shape = tuple(normalized_shape)  # type: ignore[arg-type]
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = nn.Parameter(torch.ones(shape, **kwargs))
        self.bias = nn.Parameter(torch.zeros(shape, **kwargs))

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(inp, self.weight.shape, self.weight, self.bias, self.eps)

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Do nothing: a LayerNorm has no extra state."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Recompute in backward, with the autocast and the scales of the forward."""
    own = {"use_reentrant", "context_fn", "determinism_check", "debug", "tp_group"}
    own |= {"distribute_saved_activations", "get_rng_state_tracker"}
    CHECKPOINTED.append({name: kwargs.pop(name) for name in own & {*kwargs}})
    state = FP8GlobalStateManager.quantization_state
    enabled, recipe = state.fp8_enabled, state.fp8_recipe
    phases = ["second", "first"]

    def run(*args: Any, **kwargs: Any) -> Any:
        state.recompute = phase = phases.pop()
        try:
            if phase == "first":
                return function(*args, **kwargs)
            with autocast(enabled=enabled, recipe=recipe):
                return function(*args, **kwargs)
        finally:
            state.recompute = ""

    return torch.utils.checkpoint.checkpoint(
        run, *args, use_reentrant=False, early_stop=False, **kwargs
    )
