"""Quantize the linear layers of models to 8 or 4 bits with bitsandbytes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate_big_model import STRATEGIES
from accelerate_big_model.device_map import get_balanced_memory, infer_auto_device_map
from accelerate_big_model.dispatch import dispatch_model
from accelerate_big_model.loading import from_hub, load_checkpoint_in_model
from accelerate_big_model.offload import MAPPED, mapped_key
from accelerate_big_model.tensors import (
    default_device,
    find_tied_parameters,
    rebuilt,
    set_module_tensor_to_device,
)
from accelerate_checkpoint.weights import checkpoint_files, device_of
from accelerate_core.plugin import (
    CheckpointError,
    ConfigurationError,
    MissingPluginError,
    did_you_mean,
    listing,
    warn,
)
from accelerate_drop_in.constants import CustomDtype
from accelerate_launch.probes import is_bitsandbytes_multi_backend_available

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class BnbQuantizationConfig:
    """Settings for quantization: either `load_in_8bit` or `load_in_4bit`.

    Args:
        llm_int8_threshold: activations above this are computed in 16 bits; only for 8 bits.
        bnb_4bit_quant_type: "fp4" or "nf4".
        bnb_4bit_use_double_quant: also quantize the scales.
        bnb_4bit_compute_dtype: the dtype for computing with 4-bit weights: "fp32", "fp16", "bf16" or a
            torch dtype.
        torch_dtype: the dtype of weights that are not quantized; by default float16, or with 4 bits
            `bnb_4bit_compute_dtype`.
        skip_modules: names of modules, or ends of names, that are not quantized, with their submodules;
            by default the head and modules with tied weights.
        keep_in_fp32_modules: names of modules, or ends of names, that stay in float32.

    Raises:
        ConfigurationError: a value is invalid, or not exactly one of the bit widths is selected.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: Any = "fp16"
    torch_dtype: Any = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"):
            self._check(name, bool, "True or False")
        self._check("llm_int8_threshold", int | float, "a number")
        for name in ("skip_modules", "keep_in_fp32_modules"):
            self._check(name, list | None, "a list of names")
        if self.load_in_8bit == self.load_in_4bit:
            raise ConfigurationError(
                f"load_in_8bit and load_in_4bit are both {self.load_in_8bit}. Set exactly one to True."
            )
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise ConfigurationError(
                f"bnb_4bit_quant_type={self.bnb_4bit_quant_type!r} must be 'fp4' or 'nf4'."
            )
        if self.load_in_4bit and self.llm_int8_threshold != 6.0:
            warn("llm_int8_threshold has no effect with load_in_4bit.")
        self.bnb_4bit_compute_dtype = self._dtype("bnb_4bit_compute_dtype")
        if self.torch_dtype is None:
            half = torch.float16
            self.torch_dtype = half if self.load_in_8bit else self.bnb_4bit_compute_dtype
        self.torch_dtype = self._dtype("torch_dtype")
        self.target_dtype = torch.int8 if self.load_in_8bit else CustomDtype.INT4

    def _check(self, name: str, kind: Any, wanted: str) -> None:
        if not isinstance(getattr(self, name), kind):
            raise ConfigurationError(f"{name}={getattr(self, name)!r} must be {wanted}.")

    def _dtype(self, name: str) -> torch.dtype:
        value = getattr(self, name)
        if isinstance(value, torch.dtype):
            return value
        if value not in _DTYPES:
            raise ConfigurationError(
                f"{name}={value!r} must be a torch dtype or one of {listing(_DTYPES)}."
                f"{did_you_mean(str(value), _DTYPES)}"
            )
        return _DTYPES[value]


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Return the modules that are not quantized by default: the last one, and modules with tied weights."""
    tied = [name for group in find_tied_parameters(model) for name in group]
    prefix = getattr(model, "base_model_prefix", None)
    if not tied and prefix is not None and not hasattr(model, prefix):
        return []  # a model without a head
    last = [name for name, _ in model.named_children()][-1:]
    names = dict.fromkeys([*tied, *(name for name in last if name not in tied)])
    return [name.removesuffix(".weight").removesuffix(".bias") for name in names]


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """Return the device of a module's first parameter."""
    return next(parameter.parameters()).device


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | Path | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: dict[Any, Any] | None = None,
    offload_folder: str | Path | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Replace the linear layers of a model by bitsandbytes layers, and load their weights.

    Each weight is quantized when it is read. Weights that were saved in 8 bits are read unchanged.

    Args:
        model: the model, ideally created under `init_empty_weights`. Its layers are replaced in place.
        bnb_quantization_config: the settings, which are not changed.
        weights_location: see `load_checkpoint_in_model`; None quantizes the model's own weights.
        device_map: see `get_quantized_model_device_map`. With 4 bits and a dict, parts on disk (or on
            the CPU if there is an accelerator) are not quantized, as if listed in `skip_modules`.
        no_split_module_classes, max_memory: see `infer_auto_device_map`.
        offload_folder: a folder for weights on disk that can't stay in their file.
        offload_state_dict: accepted for compatibility, and ignored; there is never a second copy of
            all weights.

    Returns:
        The same model, dispatched.

    Raises:
        MissingPluginError: bitsandbytes is not installed or too old.
        ConfigurationError: the model has no weights, or quantized weights would be offloaded.

    Example:
        from accelerate_core import init_empty_weights
        from accelerate_core.utils import BnbQuantizationConfig

        accelerator.save_model(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2)), "weights")
        with init_empty_weights():
            model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
        config = BnbQuantizationConfig(load_in_8bit=True)
        model = load_and_quantize_model(model, config, "weights", device_map={"": "cpu"})
    """
    config = copy.copy(bnb_quantization_config)
    if config.skip_modules is None:
        config.skip_modules = get_keys_to_not_convert(model)
    if config.load_in_4bit and isinstance(device_map, Mapping):
        config.skip_modules = [*config.skip_modules, *filter(None, _offloaded(device_map))]
    single = config.keep_in_fp32_modules or []
    empty = [name for name, one in model.named_parameters() if one.is_meta]
    if weights_location is None and empty:
        raise ConfigurationError(
            f"{len(empty)} weights of {type(model).__name__} (such as {empty[0]!r}) are on the meta"
            " device. Pass their checkpoint as weights_location."
        )
    named = model.named_parameters(remove_duplicate=False)
    whole = {name: id(one) for name, one in named if _named(name, single)}
    model = replace_with_bnb_layers(model, config, [*config.skip_modules, *single])
    shown: Any = model  # PEFT and Accelerator.prepare read these attributes
    shown.is_loaded_in_8bit = config.load_in_8bit
    shown.is_loaded_in_4bit = config.load_in_4bit
    places = get_quantized_model_device_map(
        model, config, device_map, max_memory, no_split_module_classes
    )
    if weights_location is None:
        for name, weight in list(model.named_parameters()):
            dtype = torch.float32 if id(weight) in whole.values() else config.torch_dtype
            if _is_quantized(weight):
                on = device_of(name, places)
                set_module_tensor_to_device(model, name, on, weight.detach(), dtype)
            elif weight.is_floating_point():
                weight.data = weight.data.to(dtype)
    else:
        weights_location = from_hub(weights_location)
        _expect_scales(model, weights_location)
        load_checkpoint_in_model(
            model,
            weights_location,
            places,
            offload_folder,
            config.torch_dtype,
            offload_state_dict,
            keep_in_fp32_modules=[*whole, "SCB"],
        )
        _give_scales(model, weights_location)
    index = getattr(model, "_offload_index", None) or None
    return dispatch_model(model, places, offload_dir=offload_folder, offload_index=index)


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: Sequence[str] | None = None,
    current_key_name: Sequence[str] | None = None,
) -> nn.Module:
    """Replace a model's linear layers by bitsandbytes layers, not yet quantized, and return the model.

    Args:
        modules_to_not_convert: names of modules, or ends of names, that are kept with their submodules.
        current_key_name: the parts of the model's full name, if it is inside a larger model.

    Raises:
        MissingPluginError: bitsandbytes is not installed or too old.
    """
    if not is_bitsandbytes_multi_backend_available():
        raise MissingPluginError(
            "Quantization to 8 or 4 bits needs bitsandbytes 0.46 or newer. Install it with: "
            'pip install -U "bitsandbytes>=0.46"'
        )
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    config = bnb_quantization_config
    kept = modules_to_not_convert or ()
    found = False
    for name, layer in list(model.named_modules()):
        # Attention reads the weights of its output layer without calling it.
        other = nn.modules.linear.NonDynamicallyQuantizableLinear, Linear4bit, Linear8bitLt
        if not name or not isinstance(layer, nn.Linear) or isinstance(layer, other):
            continue
        if _named(".".join([*(current_key_name or ()), name]), kept):
            continue
        sizes = (layer.in_features, layer.out_features, layer.bias is not None)
        made: Any
        with torch.device("meta"):
            if config.load_in_8bit:
                threshold = config.llm_int8_threshold
                made = Linear8bitLt(*sizes, has_fp16_weights=False, threshold=threshold)
            else:
                made = Linear4bit(
                    *sizes,
                    config.bnb_4bit_compute_dtype,
                    compress_statistics=config.bnb_4bit_use_double_quant,
                    quant_type=config.bnb_4bit_quant_type,
                )
        made.weight = rebuilt(made.weight, layer.weight.detach())
        made.bias = layer.bias
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, made.requires_grad_(False).train(layer.training))
        found = True
    if not found:
        warn(f"{type(model).__name__} has no linear layer to quantize, apart from skipped modules.")
    return model


def get_quantized_model_device_map(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    device_map: str | Mapping[str, Any] | None = None,
    max_memory: dict[Any, Any] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return a device map for a model whose linear layers have been replaced.

    Args:
        device_map: devices by module name; "auto", "balanced", "balanced_low_0" or "sequential"; None
            for the current accelerator, or the CPU if there is none.
        max_memory, no_split_module_classes: see `infer_auto_device_map`.

    Raises:
        ConfigurationError: quantized weights would be offloaded: to the disk, or to the CPU although
            there is an accelerator.
    """
    config = bnb_quantization_config
    if device_map is None:
        device_map = {"": default_device()}
    if not isinstance(device_map, Mapping):
        if device_map not in STRATEGIES:
            raise ConfigurationError(
                f"device_map={device_map!r} is neither a dict nor a strategy. The strategies are"
                f" {listing(STRATEGIES)}.{did_you_mean(str(device_map), STRATEGIES)}"
            )
        single = config.keep_in_fp32_modules or ()
        how: dict[str, Any] = {
            "no_split_module_classes": no_split_module_classes,
            "dtype": config.target_dtype,
            "special_dtypes": {
                name: torch.float32 if _named(name, single) else config.torch_dtype
                for name, one in model.named_parameters()
                if one.is_floating_point() and not _is_quantized(one)
            },
        }
        if device_map != "sequential":
            sparing = device_map == "balanced_low_0"
            max_memory = get_balanced_memory(model, max_memory=max_memory, low_zero=sparing, **how)
        device_map = infer_auto_device_map(model, max_memory=max_memory, **how)
    away = _offloaded(device_map)
    for name, one in model.named_parameters():
        if _is_quantized(one) and any(
            f"{name}.".startswith(f"{part}." if part else "") for part in away
        ):
            raise ConfigurationError(
                f"The device map puts {name!r} on {str(device_of(name, device_map))!r}, but quantized"
                " weights cannot be offloaded. Raise max_memory for the accelerators, or list the modules"
                " to offload in skip_modules, which keeps them in torch_dtype."
            )
    return dict(device_map)


def _named(name: str, parts: Sequence[str]) -> bool:
    """Return whether a name, or the name of a module that contains it, ends with one of `parts`."""
    return any(f"{part}." in f"{name}." for part in parts)


def _is_quantized(weight: torch.Tensor) -> bool:
    return type(weight).__module__.startswith("bitsandbytes.")


def _offloaded(device_map: Mapping[str, Any]) -> list[str]:
    """Return the parts of a device map on disk, and those on the CPU if it has an accelerator."""
    places = {name: str(device) for name, device in device_map.items()}
    lone = all(device in ("cpu", "disk") for device in places.values())
    return [
        name for name, device in places.items() if device in ("disk", *(() if lone else ("cpu",)))
    ]


def _expect_scales(model: nn.Module, checkpoint: str | Path) -> None:
    """Prepare 8-bit layers to load weights that were saved quantized, with their scales."""
    for file in checkpoint_files(checkpoint):
        opened = MAPPED[mapped_key(file)](file)
        layers = {n: one for n, one in model.named_modules() if _is_8bit(one)}
        for name in opened.names():
            owner, _, leaf = name.rpartition(".")
            if owner in layers and leaf in ("SCB", "weight_format"):
                layers[owner].register_buffer(leaf, opened.peek(name).to("meta"))
            elif owner in layers and leaf == "weight" and opened.peek(name).dtype == torch.int8:
                weight = layers[owner].weight
                eight = torch.empty_like(weight, dtype=torch.int8, device="meta")
                layers[owner].weight = rebuilt(weight, eight)


def _give_scales(model: nn.Module, checkpoint: str | Path) -> None:
    for name, layer in model.named_modules():
        if _is_8bit(layer):
            weight: Any = layer.weight
            scale = layer._buffers.pop("SCB", None)
            layer._buffers.pop("weight_format", None)
            weight.SCB = weight.SCB if scale is None else scale
            if weight.dtype == torch.int8 and weight.SCB is None:
                raise CheckpointError(
                    f"{checkpoint} has {name}.weight in 8 bits without {name}.SCB, its scale. "
                    "Save the quantized model again, with all of its state."
                )


def _is_8bit(layer: nn.Module) -> bool:
    return type(layer).__name__ == "Linear8bitLt"
