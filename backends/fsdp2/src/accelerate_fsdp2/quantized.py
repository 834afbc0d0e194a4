"""Quantized frozen weights: which of them can be sharded, and the scales that bitsandbytes keeps apart.

bitsandbytes keeps the scales of a 4-bit weight in a `QuantState`, not in the weight. They stay whole on
every rank. FSDP2 shards and gathers the packed weight, and the layer finds the scales in its own
`quant_state`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelerate_core.plugin import ConfigurationError, PrepareError


def _is_bitsandbytes(value: Any, name: str) -> bool:
    """Return whether a value's class is one of bitsandbytes', which may not be installed."""
    return any(
        kind.__name__ == name and kind.__module__.startswith("bitsandbytes.")
        for kind in type(value).__mro__
    )


def _four_bit_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and module of each layer with a 4-bit weight of bitsandbytes."""
    for name, module in model.named_modules():
        if _is_bitsandbytes(module, "Linear4bit") or _is_bitsandbytes(module, "Embedding4bit"):
            yield name, module


def is_packed(module: nn.Module) -> bool:
    """Return whether bitsandbytes has packed a layer's weight, so its shape is not the layer's."""
    weight = getattr(module, "weight", None)
    return _is_bitsandbytes(weight, "Params4bit") or _is_bitsandbytes(weight, "Int8Params")


def check(model: nn.Module) -> None:
    """Check that 4-bit weights are quantized, and give each layer the scales of its weight.

    Raises:
        PrepareError: a weight is not quantized yet, or was repacked for inference.
    """
    for name, module in _four_bit_layers(model):
        weight = module.weight
        if isinstance(weight, DTensor) or weight.is_meta:
            continue
        scales = getattr(weight, "quant_state", None) or module.quant_state
        if scales is None:
            raise PrepareError(
                f"{name!r} is a {type(module).__name__} of bitsandbytes, but its weight is not quantized "
                "yet. bitsandbytes quantizes when a model moves to a device. Call "
                "model.to(accelerator.device) before prepare."
            )
        if getattr(scales, "packing_format_for_cpu", False):
            raise PrepareError(
                f"bitsandbytes repacked {name!r} for inference, because the model ran in eval mode on "
                "this CPU. That rounds its scales, and it can't be undone exactly. Load the model "
                "again, and call prepare before its first forward."
            )
        module.quant_state = scales  # a copied model has two copies, one in the weight


def check_dtypes(model: nn.Module, param_dtype: torch.dtype | None) -> None:
    """Check that gathering would not convert packed 4-bit weights.

    Args:
        param_dtype: the dtype to which FSDP2 converts parameters.

    Raises:
        ConfigurationError: they are stored as floats of another dtype.
    """
    for name, module in _four_bit_layers(model):
        stored = module.weight.dtype
        if param_dtype not in (None, stored) and stored.is_floating_point:
            raise ConfigurationError(
                f"The 4-bit weight of {name!r} is stored as {stored}, and mixed precision converts "
                f"parameters to {param_dtype}, which would destroy it. FSDP2 shards any storage, so "
                "leave bnb_4bit_quant_storage out, or set it to torch.uint8."
            )


def scales_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the scales that bitsandbytes keeps apart from weights, by name."""
    found: dict[str, torch.Tensor | None] = {}
    for name, module in _four_bit_layers(model):
        state = module.quant_state
        while state is not None:
            for part in ("absmax", "code", "offset"):
                found[f"{name}.{part}"] = getattr(state, part)
            state = state.state2
            name += ".state2"
    for name, module in model.named_modules():
        if _is_bitsandbytes(module, "Linear8bitLt"):
            own: Any = module
            weight_scales = getattr(own.weight, "SCB", None)
            found[f"{name}.SCB"] = own.state.SCB if weight_scales is None else weight_scales
    return {name: one for name, one in found.items() if isinstance(one, torch.Tensor)}


def without_scales(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict without the scales of 4-bit weights, which bitsandbytes' layers can't load."""
    weights = tuple(f"{name}.weight.".lstrip(".") for name, _ in _four_bit_layers(model))
    return {name: value for name, value in state.items() if not name.startswith(weights)}


def kept_whole(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the frozen quantized weights that FSDP2 can't gather, by name.

    These are 8-bit weights of bitsandbytes, and tensor subclasses that don't implement torch's hooks for
    the all-gather, such as most of torchao's.
    """
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
        and not isinstance(parameter, DTensor)
        and (
            _is_bitsandbytes(parameter, "Int8Params")
            or (
                is_traceable_wrapper_subclass(parameter)
                and not hasattr(parameter, "fsdp_pre_all_gather")
            )
        )
    }


def warning(model: nn.Module, whole: dict[str, nn.Parameter]) -> str:
    """Return the text that says which weights stay whole."""
    first, parameter = next(iter(whole.items()))
    held = sum(_bytes(one) for one in whole.values())
    return (
        f"{len(whole)} frozen weights of {type(model).__name__}, such as {first!r} "
        f"({type(parameter).__name__}), can't be sharded, because their quantization doesn't support it. "
        f"Each rank holds all {held / 2**20:,.1f} MiB of them. 4-bit weights (NF4) are sharded."
    )


def _bytes(tensor: torch.Tensor) -> int:
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.nbytes
    return sum(_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


def finish(model: nn.Module) -> None:
    """After sharding, make 4-bit layers save their scales, and not repack their weights.

    In eval mode on some CPUs, bitsandbytes replaces weight and scales by a format for inference. FSDP2
    would gather the original weight again, and the layer would read it in the other format.
    """
    for _, module in _four_bit_layers(model):
        weight, scales = module.weight, module.quant_state
        weight.quant_state = scales
        if scales is not None:
            for name, value in scales.as_dict(packed=True).items():
                if "." not in name:  # torch's get_model_state_dict looks for them on the weight
                    setattr(weight, name, value)
        module.support_avx512bf16_for_cpu = False
