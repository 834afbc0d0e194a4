"""Accelerate's functions for models and precision outside of an Accelerator."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from accelerate_big_model.tensors import (
    align_module_device,
    default_device,
    has_offloaded_params,
    non_persistent_buffers,
)
from accelerate_compile.recognise import is_compiled_module, within_wrappers
from accelerate_core.builtin.compiled import strip_compiled
from accelerate_core.distributed.process import current_user
from accelerate_core.plugin import convert_to_fp32, send_to_device, uncompiled
from accelerate_core.training.forward import unwrap_forward

_PARALLEL = "torch.nn.parallel."


def _inside(model: nn.Module) -> nn.Module:
    """Return the model inside torch's parallel wrappers."""
    while str(type(model).forward.__module__).startswith(_PARALLEL):
        model = next(model.children())
    return model


def without_containers(model: nn.Module) -> nn.Module:
    """Return the model inside torch's parallel wrappers. If these were compiled, it is compiled, too."""
    inner = _inside(uncompiled(model))
    if model is uncompiled(model) or inner is uncompiled(model):
        return _inside(model)
    wrapper: Any = model
    made: nn.Module = type(wrapper)(inner, wrapper.dynamo_ctx)
    return made


def extract_model_from_parallel(
    model: nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> nn.Module:
    """Return the user's model inside the wrappers of parallel training.

    The active backend removes its own wrappers, and this function those of torch.

    Args:
        model: a wrapped or plain model.
        keep_fp32_wrapper: False also removes the mixed precision around its forward.
        keep_torch_compile: False also removes its compilation, except from submodules that the script
            itself passed to `torch.compile`.
        recursive: also replace wrapped submodules, in place.
    """
    user = current_user()
    inner = without_containers(model)
    if user is not None:
        inner = without_containers(user.unwrap_model(inner))
    if recursive:
        for name, child in inner.named_children():
            found = extract_model_from_parallel(child, recursive=True)
            if found is not child:
                setattr(inner, name, found)
    if not keep_fp32_wrapper:
        unwrap_forward(inner)
        own = vars(inner).pop("_original_forward", None)  # set by a script that wrapped it
        if own is not None:
            inner.forward = own
            if getattr(own, "__func__", None) is type(inner).forward:
                del inner.forward
    if keep_torch_compile:
        return inner
    inner = uncompiled(inner)
    in_place = any(part._compiled_call_impl is not None for part in inner.modules())
    return strip_compiled(inner) if in_place else inner


def has_compiled_regions(module: object) -> bool:
    """Return whether a submodule is compiled, rather than only the module itself."""
    if not isinstance(module, nn.Module):
        return False
    root = within_wrappers(uncompiled(module))
    return any(is_compiled_module(part) for part in root.modules() if part is not root)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward so that 16-bit floating-point tensors in its output become float32.

    A model with a wrapped forward can be pickled.
    """
    return ConvertOutputsToFp32(model_forward)


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Create a gradient scaler for the current device. `distributed_type` is ignored."""
    return torch.amp.GradScaler(default_device().type, **kwargs)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: Any = None
) -> AbstractContextManager[Any]:
    """Return the autocast context of the latest Accelerator, or torch's if there is none.

    Args:
        native_amp: False returns a context that does nothing.
        autocast_kwargs: an `AutocastKwargs` with options.
    """
    if not native_amp:
        return nullcontext()
    user = current_user()
    if user is not None:
        entered: AbstractContextManager[Any] = user.autocast(autocast_handler=autocast_kwargs)
        return entered
    options = autocast_kwargs.to_kwargs() if autocast_kwargs is not None else {}
    return torch.autocast(default_device().type, **options)


def is_peft_model(model: nn.Module) -> bool:
    """Return whether a model is a PEFT model inside its wrappers, without importing PEFT."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(extract_model_from_parallel(model), peft.PeftModel)


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Return whether a model has 4-bit linear layers from bitsandbytes."""
    return any(
        type(module).__module__.startswith("bitsandbytes") and "4bit" in type(module).__name__
        for module in model.modules()
    )


class ConvertOutputsToFp32:
    """The wrapped forward of `convert_outputs_to_fp32`, as an object that can be pickled."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, model_forward, updated=())
        self.model_forward = model_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class with this name among the classes of a model's modules, None if there is none."""
    return next((type(one) for one in module.modules() if type(one).__name__ == name), None)


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str, model: nn.Module, device: Any
) -> set[nn.Parameter]:
    """Return the parameters of modules, moved to a device.

    Args:
        modules: the modules, or a regular expression that must match their full names.
    """
    if isinstance(modules, str):
        wanted = re.compile(modules)
        modules = [one for name, one in model.named_modules() if wanted.fullmatch(name)]
    found = [one.to(device) for one in modules]
    return {parameter for one in found for parameter in one.parameters()}


def get_non_persistent_buffers(
    module: nn.Module, recurse: bool = False, fqns: bool = False
) -> set[str]:
    """Return the names of buffers that are not in state dicts; full names with `fqns`."""
    names = non_persistent_buffers(module, recurse)
    return names if fqns else {name.rpartition(".")[2] for name in names}


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Return whether two devices are the same. An accelerator without an index has index 0."""
    first, second = (
        (one.type, one.index if one.type == "cpu" else one.index or 0)
        for one in (first_device, second_device)
    )
    return first == second


def move_to_device(state: Any, device: Any) -> Any:
    """Return an optimizer's state with its tensors moved to a device."""
    return send_to_device(state, device)


#: The layers that layerwise casting applies to.
SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    nn.Linear,
)


def is_repeated_blocks(module: nn.Module) -> bool:
    """Return whether a module is a list of blocks of one class."""
    blocks = list(module) if isinstance(module, nn.ModuleList) else []
    return bool(blocks) and all(isinstance(block, type(blocks[0])) for block in blocks)


def has_repeated_blocks(module: nn.Module) -> bool:
    """Return whether a module is or contains a list of blocks of one class."""
    return any(map(is_repeated_blocks, module.modules()))


def get_model_tp_size(model: nn.Module) -> int | None:
    """Return the number of ranks over which Transformers has sharded a model, None if it hasn't."""
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    configured = (
        config.get("tp_size") if isinstance(config, dict) else getattr(config, "tp_size", None)
    )
    size: int | None = getattr(model, "tp_size", None)
    return size if size is not None else configured


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: MutableMapping[str, Any],
    device_to_put_offload: int | str | torch.device = "cpu",
) -> MutableMapping[str, Any]:
    """Replace the weights of an offloaded module in a state dict by their values, and return it.

    Args:
        module: the module.
        module_name: the full name of one of its weights, such as "layer.weight".
        state_dict: the state dict, in which only existing names are replaced.
        device_to_put_offload: the device for the weights.
    """
    holder = module_name.rpartition(".")[0]
    place = device_to_put_offload if has_offloaded_params(module) else None
    with align_module_device(module, place):
        for name, value in module.state_dict().items():
            if f"{holder}.{name}" in state_dict:
                state_dict[f"{holder}.{name}"] = value
    return state_dict


def proper_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return a dtype for itself or its name, such as `torch.float16` or `float16`."""
    if isinstance(dtype, torch.dtype):
        return dtype
    found: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
    return found
