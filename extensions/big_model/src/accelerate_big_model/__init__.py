"""Models larger than one device: empty weights, device maps, dispatching, offloading."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate_big_model.attach import attach_align_device_hook as attach_align_device_hook
    from accelerate_big_model.attach import (
        attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
    )
    from accelerate_big_model.attach import (
        attach_execution_device_hook as attach_execution_device_hook,
    )
    from accelerate_big_model.casting import (
        attach_layerwise_casting_hooks as attach_layerwise_casting_hooks,
    )
    from accelerate_big_model.device_map import clean_device_map as clean_device_map
    from accelerate_big_model.device_map import infer_auto_device_map as infer_auto_device_map
    from accelerate_big_model.dispatch import cpu_offload as cpu_offload
    from accelerate_big_model.dispatch import cpu_offload_with_hook as cpu_offload_with_hook
    from accelerate_big_model.dispatch import disk_offload as disk_offload
    from accelerate_big_model.dispatch import dispatch_model as dispatch_model
    from accelerate_big_model.dispatch import (
        get_state_dict_offloaded_model as get_state_dict_offloaded_model,
    )
    from accelerate_big_model.dispatch import (
        load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
    )
    from accelerate_big_model.hooks import AlignDevicesHook as AlignDevicesHook
    from accelerate_big_model.hooks import CpuOffload as CpuOffload
    from accelerate_big_model.hooks import LayerwiseCastingHook as LayerwiseCastingHook
    from accelerate_big_model.hooks import ModelHook as ModelHook
    from accelerate_big_model.hooks import SequentialHook as SequentialHook
    from accelerate_big_model.hooks import UserCpuOffloadHook as UserCpuOffloadHook
    from accelerate_big_model.hooks import add_hook_to_module as add_hook_to_module
    from accelerate_big_model.hooks import remove_hook_from_module as remove_hook_from_module
    from accelerate_big_model.hooks import (
        remove_hook_from_submodules as remove_hook_from_submodules,
    )
    from accelerate_big_model.init import init_empty_weights as init_empty_weights
    from accelerate_big_model.init import init_on_device as init_on_device
    from accelerate_big_model.loading import load_checkpoint_in_model as load_checkpoint_in_model
    from accelerate_big_model.offload import OffloadedWeightsLoader as OffloadedWeightsLoader
    from accelerate_big_model.offload import PrefixedDataset as PrefixedDataset
    from accelerate_big_model.offload import (
        extract_submodules_state_dict as extract_submodules_state_dict,
    )
    from accelerate_big_model.offload import load_offloaded_weight as load_offloaded_weight
    from accelerate_big_model.offload import load_offloaded_weights as load_offloaded_weights
    from accelerate_big_model.offload import offload_state_dict as offload_state_dict
    from accelerate_big_model.offload import offload_weight as offload_weight
    from accelerate_big_model.offload import save_offload_index as save_offload_index

#: Module -> its names; each is imported when one of them is first used: commands need no torch.
_OF_MODULE = {
    "accelerate_big_model.attach": (
        "attach_align_device_hook",
        "attach_align_device_hook_on_blocks",
        "attach_execution_device_hook",
    ),
    "accelerate_big_model.casting": ("attach_layerwise_casting_hooks",),
    "accelerate_big_model.device_map": ("clean_device_map", "infer_auto_device_map"),
    "accelerate_big_model.dispatch": (
        "cpu_offload",
        "cpu_offload_with_hook",
        "disk_offload",
        "dispatch_model",
        "get_state_dict_offloaded_model",
        "load_checkpoint_and_dispatch",
    ),
    "accelerate_big_model.hooks": (
        "AlignDevicesHook",
        "CpuOffload",
        "LayerwiseCastingHook",
        "ModelHook",
        "SequentialHook",
        "UserCpuOffloadHook",
        "add_hook_to_module",
        "remove_hook_from_module",
        "remove_hook_from_submodules",
    ),
    "accelerate_big_model.init": ("init_empty_weights", "init_on_device"),
    "accelerate_big_model.loading": ("load_checkpoint_in_model",),
    "accelerate_big_model.offload": (
        "OffloadedWeightsLoader",
        "PrefixedDataset",
        "extract_submodules_state_dict",
        "load_offloaded_weight",
        "load_offloaded_weights",
        "offload_state_dict",
        "offload_weight",
        "save_offload_index",
    ),
}
_HOMES = {name: module for module, names in _OF_MODULE.items() for name in names}

__all__ = [*sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
