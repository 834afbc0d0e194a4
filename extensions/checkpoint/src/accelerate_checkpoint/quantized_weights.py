"""Store quantized weights in checkpoints as plain tensors, and restore them bit for bit.

torchao's weights are tensor subclasses, which safetensors can't store. bitsandbytes adds the scales of its
layers to the state dict, but `load_state_dict` of these layers rejects them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelerate_core.plugin import CheckpointError

#: Part of the names under which bitsandbytes stores settings as JSON, whose length varies.
_SETTINGS = ".quant_state.bitsandbytes__"


def is_wrapper(value: Any) -> bool:
    """Return whether a value is a tensor subclass that wraps other tensors, but not a DTensor."""
    return (
        isinstance(value, torch.Tensor)
        and is_traceable_wrapper_subclass(value)
        and not hasattr(value, "placements")
    )


def as_plain_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict that has the wrapped tensors in place of tensor subclasses.

    A weight `name` of torchao becomes `name.qdata` and `name.scale`, for example. They share memory with it.
    """
    plain: dict[str, Any] = {}
    for name, value in state.items():
        if is_wrapper(value):
            names = value.__tensor_flatten__()[0]
            plain |= as_plain_tensors({f"{name}.{part}": getattr(value, part) for part in names})
        else:
            plain[name] = value
    return plain


def has_fixed_shape(name: str) -> bool:
    """Return whether an entry of a state dict has the same shape in every checkpoint of the model."""
    return _SETTINGS not in name


def scale_names(model: nn.Module) -> set[str]:
    """Return the names under which bitsandbytes' layers store scales in the model's state dict."""
    names = {
        f"{prefix}weight.{key}"
        for prefix, layer in _layers(model, "Linear4bit")
        for key in _four_bit_entries(layer)
    }
    return names | {
        f"{prefix}SCB"
        for prefix, layer in _layers(model, "Linear8bitLt")
        if _eight_bit_scales(layer) is not None
    }


def first_scales(model: nn.Module, names: Iterable[str]) -> str | None:
    """Return the first name in a file that belongs to the scales of one of the model's quantized layers."""
    four = {prefix for prefix, _ in _layers(model, "Linear4bit")}
    eight = {prefix for prefix, _ in _layers(model, "Linear8bitLt")}
    for name in names:
        owner, of_weight, _ = name.partition("weight.")
        if (of_weight and owner in four) or (
            name.endswith("SCB") and name.removesuffix("SCB") in eight
        ):
            return name
    return None


def undo_packing(model: nn.Module) -> None:
    """Undo the packing that bitsandbytes applies in eval mode on CPUs with AVX512-BF16.

    bitsandbytes also does this when it makes a state dict, but then leaves single scales transposed. Its
    packing has rounded them to bf16.
    """
    for _, layer in _layers(model, "Linear4bit"):
        state = getattr(layer.weight, "quant_state", None)
        if state is None:
            continue
        if getattr(state, "packing_format_for_cpu", False):
            layer._save_to_state_dict({}, "", True)
            state = layer.weight.quant_state
        if state.absmax.dim() == 2:
            state.absmax = state.absmax.t().reshape(-1).float()


def has_wrappers(model: nn.Module) -> bool:
    """Return whether a parameter is a tensor subclass that wraps other tensors, maybe in a DTensor."""
    return any(is_wrapper(getattr(one, "_local_tensor", one)) for one in model.parameters())


def refuse_wrappers(state: Mapping[str, Any]) -> None:
    """Check that a model's state dict has no tensor subclasses, before its weights are exported.

    Raises:
        CheckpointError: it has one, as a plain tensor or in a DTensor.
    """
    for name, value in state.items():
        local = getattr(value, "_local_tensor", value)
        if is_wrapper(local):
            raise CheckpointError(
                f"save_model can't write {name!r}, because safetensors can't store {type(local).__name__}, "
                "the type of a quantized weight. To save the adapters, call "
                "accelerator.unwrap_model(model).save_pretrained(directory, "
                "state_dict=accelerator.get_state_dict(model)). To continue training later, use save_state."
            )


@torch.no_grad()
def restore_quantized(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Copy wrapped tensors and scales into the model, and return what `load_state_dict` has to load.

    Raises:
        CheckpointError: a quantized weight is incomplete, or doesn't fit the model. The model is unchanged.
    """
    rest = dict(weights)
    own = model.state_dict(keep_vars=True)
    copies = _wrapped(own, rest) + _eight_bit(model, rest)
    states = list(_four_bit(model, rest))
    for tensor, saved in copies:
        tensor.copy_(saved)
    for state, saved in states:
        _copy_scales(state, saved)
    return rest


def _wrapped(
    own: Mapping[str, Any], rest: dict[str, Any]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Take the tensors of wrappers out of `rest`, and put the model's wrappers there instead."""
    copies = []
    for name, value in own.items():
        if not is_wrapper(value):
            continue
        parts = as_plain_tensors({name: value})
        if not parts.keys() & rest.keys():
            continue  # load_state_dict reports a missing weight
        for part, tensor in parts.items():
            copies.append((tensor, _taken(rest, part, tensor)))
        rest[name] = value.detach()
    return copies


def _eight_bit(model: nn.Module, rest: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    copies = []
    for prefix, layer in _layers(model, "Linear8bitLt"):
        scales = _eight_bit_scales(layer)
        present = f"{prefix}SCB" in rest or f"{prefix}weight" in rest
        if scales is not None and present:
            copies.append((scales, _taken(rest, f"{prefix}SCB", scales)))
    return copies


def _four_bit(model: nn.Module, rest: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Take the scales of 4-bit layers out of `rest`, and yield the layer's and the saved `QuantState`."""
    for prefix, layer in _layers(model, "Linear4bit"):
        entries = _four_bit_entries(layer)
        name = f"{prefix}weight"
        if not entries or not {name, *(f"{name}.{key}" for key in entries)} & rest.keys():
            continue
        saved = {
            key: _taken(rest, f"{name}.{key}", entry if has_fixed_shape(f".{key}") else None)
            for key, entry in entries.items()
        }
        state = layer.weight.quant_state
        restored = type(state).from_dict(saved, device=state.absmax.device)
        for what in ("quant_type", "blocksize", "shape"):
            here, there = getattr(state, what), getattr(restored, what)
            if here != there:
                raise CheckpointError(
                    f"The 4-bit weight {name!r} has {what}={there} in the checkpoint, and {what}={here} "
                    "in the model. Load the base model with the quantization config of the run that was "
                    "saved."
                )
        yield state, restored


def _taken(rest: dict[str, Any], name: str, like: torch.Tensor | None) -> torch.Tensor:
    """Remove a tensor from the weights, and check that it fits."""
    if name not in rest:
        raise CheckpointError(
            f"The checkpoint has no {name!r}, which belongs to a quantized weight of the model. Load a "
            "checkpoint of a model with the same quantization."
        )
    saved: torch.Tensor = rest.pop(name)
    if like is not None and (saved.shape, saved.dtype) != (like.shape, like.dtype):
        raise CheckpointError(
            f"{name!r} is {saved.dtype} of shape {list(saved.shape)} in the checkpoint, and {like.dtype} of "
            f"shape {list(like.shape)} in the model. Load the base model with the quantization config of "
            "the run that was saved."
        )
    return saved


def _copy_scales(state: Any, saved: Any) -> None:
    """Copy one `QuantState` into another, keeping its tensors, to which other objects may refer."""
    state.absmax.copy_(saved.absmax)
    state.dtype = saved.dtype
    if not torch.equal(state.code, saved.code):
        state.code = saved.code.clone()  # bitsandbytes shares the old one between layers
    if state.nested:
        state.offset.copy_(saved.offset)
        _copy_scales(state.state2, saved.state2)


def _layers(model: nn.Module, kind: str) -> Iterator[tuple[str, Any]]:
    """Yield prefix and module of each layer of a class of bitsandbytes, which may not be installed."""
    for name, module in model.named_modules():
        if any(
            one.__name__ == kind and one.__module__.startswith("bitsandbytes.")
            for one in type(module).__mro__
        ):
            yield f"{name}." if name else "", module


def _four_bit_entries(layer: Any) -> dict[str, torch.Tensor]:
    """Return what a layer adds to its state dict, without its prefix. Empty before it is quantized."""
    state = getattr(layer.weight, "quant_state", None)
    return {} if state is None else dict(state.as_dict(packed=True))


def _eight_bit_scales(layer: Any) -> torch.Tensor | None:
    """Return the scales, which bitsandbytes moves from the weight to the layer in the first forward."""
    if layer.state.has_fp16_weights:
        return None
    scales: torch.Tensor | None = getattr(layer.weight, "SCB", None)
    return layer.state.SCB if scales is None else scales
