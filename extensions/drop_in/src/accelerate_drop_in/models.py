"""What user code asks of models and precision outside of an Accelerator."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from accelerate_big_model.tensors import align_module_device, default_device, has_offloaded_params
from accelerate_core.builtin.compiled import (
    is_compiled_module,
    strip_compiled,
    uncompiled,
    within_wrappers,
)
from accelerate_core.distributed.process import current_user
from accelerate_core.distributed.tree import convert_to_fp32, send_to_device
from accelerate_core.training.forward import unwrap_forward

_PARALLEL = "torch.nn.parallel."


def _inside(model: nn.Module) -> nn.Module:
    """Return what torch's own parallel containers hold."""
    while str(type(model).forward.__module__).startswith(_PARALLEL):
        model = next(model.children())
    return model


def without_containers(model: nn.Module) -> nn.Module:
    """Return the model within torch's parallel containers, compiled if they were."""
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
    """Return the model a user made, out of what it was wrapped in for parallel running.

    The active backend unwraps its own containers; torch's are known here.

    Args:
        model: wrapped or not.
        keep_fp32_wrapper: False removes the mixed precision around its forward.
        keep_torch_compile: False removes its compilation, not that of submodules which the script
            passed to `torch.compile` itself.
        recursive: look into submodules too; those wrapped are replaced in place.
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
        own = vars(inner).pop("_original_forward", None)  # a script has wrapped it by hand
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
    """Whether a part of the module, not only the module itself, is compiled."""
    if not isinstance(module, nn.Module):
        return False
    root = within_wrappers(uncompiled(module))
    return any(is_compiled_module(part) for part in root.modules() if part is not root)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward so that 16 bit floating point tensors of its output become float32.

    A model with such a forward can be pickled.
    """
    return ConvertOutputsToFp32(model_forward)


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Make a gradient scaler for the current device; `distributed_type` is not needed."""
    return torch.amp.GradScaler(default_device().type, **kwargs)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: Any = None
) -> AbstractContextManager[Any]:
    """Return the autocast of the latest Accelerator, or torch's own if there is none.

    Without `native_amp` nothing is cast.

    Args:
        autocast_kwargs: how autocast is entered.
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
    """Say whether a model, unwrapped, is one of peft's; nothing is imported for it."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(extract_model_from_parallel(model), peft.PeftModel)


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Say whether a model holds 4 bit linear layers of bitsandbytes."""
    return any(
        type(module).__module__.startswith("bitsandbytes") and "4bit" in type(module).__name__
        for module in model.modules()
    )


class ConvertOutputsToFp32:
    """`convert_outputs_to_fp32` as an object that can be pickled."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, model_forward, updated=())
        self.model_forward = model_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class of that name among those of a model's modules, None if there is none."""
    return next((type(one) for one in module.modules() if type(one).__name__ == name), None)


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str, model: nn.Module, device: Any
) -> set[nn.Parameter]:
    """Return the parameters of some modules, moved to a device.

    Args:
        modules: the modules, or a regular expression that their whole names match.
    """
    if isinstance(modules, str):
        wanted = re.compile(modules)
        modules = [one for name, one in model.named_modules() if wanted.fullmatch(name)]
    found = [one.to(device) for one in modules]
    return {parameter for one in found for parameter in one.parameters()}


def get_non_persistent_buffers(
    module: nn.Module, recurse: bool = False, fqns: bool = False
) -> set[str]:
    """Return the names of buffers that a state dict leaves out; whole ones with `fqns`."""
    return {
        f"{prefix}.{name}" if fqns and prefix else name
        for prefix, one in (module.named_modules() if recurse else [("", module)])
        for name in one._non_persistent_buffers_set
    }


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Say whether two devices are one: without a number, an accelerator is the first."""
    first, second = (
        (one.type, one.index if one.type == "cpu" else one.index or 0)
        for one in (first_device, second_device)
    )
    return first == second


def move_to_device(state: Any, device: Any) -> Any:
    """Return the state of an optimizer with its tensors on a device."""
    return send_to_device(state, device)


#: Layers that layerwise casting casts.
SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    nn.Linear,
)


def is_repeated_blocks(module: nn.Module) -> bool:
    """Say whether a module is a list of blocks of one class."""
    blocks = list(module) if isinstance(module, nn.ModuleList) else []
    return bool(blocks) and all(isinstance(block, type(blocks[0])) for block in blocks)


def has_repeated_blocks(module: nn.Module) -> bool:
    """Say whether a module holds such a list, or is one."""
    return any(map(is_repeated_blocks, module.modules()))


def get_model_tp_size(model: nn.Module) -> int | None:
    """Return over how many ranks transformers has distributed a model's layers, None if it has not."""
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    told = config.get("tp_size") if isinstance(config, dict) else getattr(config, "tp_size", None)
    size: int | None = getattr(model, "tp_size", None)
    return size if size is not None else told


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: MutableMapping[str, Any],
    device_to_put_offload: int | str | torch.device = "cpu",
) -> MutableMapping[str, Any]:
    """Put the weights of an offloaded module into a state dict that has their names; return it.

    Args:
        module_name: whole name of one of its weights, such as "layer.weight".
        device_to_put_offload: where the weights come to.
    """
    holder = module_name.rpartition(".")[0]
    place = device_to_put_offload if has_offloaded_params(module) else None
    with align_module_device(module, place):
        for name, value in module.state_dict().items():
            if f"{holder}.{name}" in state_dict:
                state_dict[f"{holder}.{name}"] = value
    return state_dict
