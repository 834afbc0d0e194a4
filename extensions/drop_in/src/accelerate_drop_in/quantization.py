"""What scripts say about weights of 8 or 4 bits; models are quantized by what loads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate_big_model.tensors import find_tied_parameters
from accelerate_core.errors import ConfigurationError, did_you_mean, listing, warn
from accelerate_drop_in.constants import CustomDtype

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class BnbQuantizationConfig:
    """How weights are quantized: either `load_in_8bit` or `load_in_4bit`.

    Args:
        llm_int8_threshold: activations above it are computed in 16 bits; of 8 bits only.
        torch_dtype: of the layers that are not quantized; float16, or with 4 bits the dtype of
            computation.
        skip_modules: names of modules that keep `torch_dtype`; by default the head, and tied ones.
        keep_in_fp32_modules: names of modules in float32.

    Raises:
        ConfigurationError: a value is wrong, or both widths or none were asked for.
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
                f"load_in_8bit and load_in_4bit are both {self.load_in_8bit}; give one of them."
            )
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise ConfigurationError(
                f"bnb_4bit_quant_type={self.bnb_4bit_quant_type!r}; allowed are 'fp4', 'nf4'."
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
                f"{name}={value!r} is no dtype here; allowed are {listing(_DTYPES)}."
                f"{did_you_mean(str(value), _DTYPES)}"
            )
        return _DTYPES[value]


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Return the modules that keep their precision: the last one, and those with tied weights."""
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
