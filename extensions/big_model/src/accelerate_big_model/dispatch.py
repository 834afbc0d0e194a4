"""Run a model whose parts are on several devices, in host memory and on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate_big_model import STRATEGIES
from accelerate_big_model.attach import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
)
from accelerate_big_model.device_map import (
    DeviceName,
    get_balanced_memory,
    infer_auto_device_map,
)
from accelerate_big_model.hooks import (
    AlignDevicesHook,
    CpuOffload,
    UserCpuOffloadHook,
    add_hook_to_module,
    remove_hook_from_module,
)
from accelerate_big_model.loading import load_checkpoint_in_model
from accelerate_big_model.offload import (
    MAPPED,
    OffloadedWeightsLoader,
    extract_submodules_state_dict,
    load_offload_index,
)
from accelerate_big_model.offload import offload_state_dict as write_state_dict
from accelerate_big_model.prefetch import read_ahead
from accelerate_big_model.saving import OffloadedState
from accelerate_big_model.tensors import (
    Device,
    TiedMap,
    check_device_map,
    check_tied_parameters_on_same_device,
    default_device,
    find_tied_parameters,
    has_offloaded_params,
    hook_of,
    joined,
    named_module_tensors,
    offload_hook,
    on_one_device,
    retie_parameters,
    set_module_tensor_to_device,
)
from accelerate_checkpoint import as_device, device_of
from accelerate_core.plugin import ConfigurationError, did_you_mean, listing


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: Sequence[str] | None = None,
) -> nn.Module:
    """Keep all weights in host memory, and load those of each module to a device while it runs.

    Args:
        execution_device: the device to run on; by default the device of the first parameter.
        offload_buffers: offload buffers, too.
        state_dict: the weights, if they are already in memory.
        preload_module_classes: names of classes that use their submodules' weights without
            calling them.
    """
    if state_dict is None:
        state_dict = {name: tensor.to("cpu") for name, tensor in model.state_dict().items()}
    return _offload_all(
        model, execution_device, offload_buffers, state_dict, preload_module_classes
    )


def disk_offload(
    model: nn.Module,
    offload_dir: str | Path,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
) -> nn.Module:
    """Keep all weights in files, and load those of each module to a device while it runs.

    Weights on the meta device must already be in the folder. All others are written there.

    Args:
        offload_dir: the folder for the weights.
        execution_device: the device to run on; by default the device of the first parameter.
        offload_buffers: offload buffers, too.
        preload_module_classes: names of classes that use their submodules' weights without
            calling them.
    """
    _write_missing(model, model.state_dict(), Path(offload_dir))
    weights = OffloadedWeightsLoader(save_folder=offload_dir)
    return _offload_all(model, execution_device, offload_buffers, weights, preload_module_classes)


def _offload_all(
    model: nn.Module,
    execution_device: Device | None,
    offload_buffers: bool,
    weights: Mapping[str, torch.Tensor],
    preload_module_classes: Sequence[str] | None,
) -> nn.Module:
    if execution_device is None:
        first = next((parameter.device for parameter in model.parameters()), None)
        execution_device = default_device() if first is None or first.type == "meta" else first
    outer = _EntryHook(execution_device, io_same_device=True)
    add_hook_to_module(model, outer, append=True)
    attach_align_device_hook(
        model,
        execution_device,
        offload=True,
        weights_map=weights,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
    )
    read_ahead(model, torch.device(as_device(execution_device)))
    return model


def _write_missing(model: nn.Module, state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write the weights that have data; those on the meta device must already be in the folder."""
    real = {name: tensor for name, tensor in state.items() if tensor.device.type != "meta"}
    known = load_offload_index(folder, missing_ok=True)
    absent = sorted(state.keys() - real.keys() - known.keys())
    if absent:
        raise ConfigurationError(
            f"{len(absent)} weights of {type(model).__name__} (such as {absent[0]!r}) are on the meta"
            f" device, but {folder} does not contain them. Load a checkpoint first."
        )
    write_state_dict(folder, real)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: Device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a whole model on the CPU until it is called, then keep it on the device.

    This is for pipelines of several models that are each called many times in turn. Calling one
    model moves the previous one back to the CPU.

    Args:
        execution_device: the device to run on; by default the accelerator if there is one.
        prev_module_hook: the handle of the model that is moved back when this one is called.

    Returns:
        The model, and a handle with `offload()` and `remove()`.

    Example:
        first, second = nn.Linear(8, 8), nn.Linear(8, 2)
        first, hook = cpu_offload_with_hook(first)
        second, hook = cpu_offload_with_hook(second, prev_module_hook=hook)
        y = second(first(x))
        hook.offload()
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Any],
    main_device: Device | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | Path | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Move the parts of a model to the devices in a map, so that calls go from one to the next.

    Parts on `"disk"` are offloaded, and so are parts on `"cpu"` if the map has an accelerator. They
    run on the main device, and their weights are there only during the call.

    Args:
        device_map: devices by module name, covering every tensor: the index of an accelerator, a
            device, `"cpu"`, `"disk"` or `"meta"`.
        main_device: where offloaded parts run; by default the first accelerator in the map.
        state_dict: the offloaded weights, if they are already in memory.
        offload_dir: the folder for weights on disk.
        offload_index: the index of the weights on disk, see `OffloadedWeightsLoader`.
        offload_buffers: offload buffers, too.
        skip_keys: names of arguments that are not moved.
        preload_module_classes: names of classes that use their submodules' weights without
            calling them.
        force_hooks: attach hooks even if everything is on one device.

    Returns:
        The same model, with the map as its attribute `hf_device_map`.

    Raises:
        ConfigurationError: the map doesn't match the model, or a folder is needed.
    """
    check_device_map(model, device_map)
    _undo_earlier_dispatch(model, device_map)
    places: dict[str, Any] = {
        name: str(device) if str(device) in ("disk", "cpu") else as_device(device)
        for name, device in device_map.items()
    }
    only = {*places.values()}
    if len(only) == 1 and "disk" not in only and not force_hooks:
        target = as_device(only.pop())
        tensors = dict(named_module_tensors(model, recurse=True))
        for name, tensor in tensors.items():
            if tensor.device.type == "meta" and target.type != "meta":
                # This raises an error that names the tensor, unlike `Module.to`.
                set_module_tensor_to_device(model, name, target)
        if any(tensor.device != target for tensor in tensors.values()):
            model.to(target)
        model.hf_device_map = dict(device_map)  # type: ignore[assignment]
        return model
    devices = [d for d in places.values() if isinstance(d, torch.device) and d.type != "meta"]
    main = as_device(next(iter(devices), "cpu") if main_device is None else main_device)
    away = {"disk"} if main.type == "cpu" else {"disk", "cpu"}
    offload = {name: device in away for name, device in places.items()}
    tied = find_tied_parameters(model)
    check_tied_parameters_on_same_device(tied, places)
    weights = _offloaded_weights(
        model, places, offload, state_dict, offload_dir, offload_index, offload_buffers
    )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    shared = [parameters[name] for group in tied for name in group]
    tied_map: TiedMap = {p.data_ptr(): {} for p in shared if p.device.type != "meta"}
    runs_on = {n: main if offload[n] else as_device(device) for n, device in places.items()}
    _place_lone_tensors(model, runs_on, weights)
    outer = _EntryHook(main, io_same_device=True, skip_keys=skip_keys)
    add_hook_to_module(model, outer, append=True)
    attach_align_device_hook_on_blocks(
        model,
        runs_on,
        offload,
        weights,
        offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        tied_params_map=tied_map,
    )
    read_ahead(model, main)
    # Keep only the addresses of tensors that stay alive; others may be reused for new tensors.
    living = {tensor.data_ptr() for tensor in weights.state_dict.values()} if weights else set()
    for address in tied_map.keys() - living:
        del tied_map[address]
    whole = [group for group in tied if on_one_device(group, places)]
    retie_parameters(model, [g for g in whole if not any(device_of(name, offload) for name in g)])
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    # On the meta device they are separate parameters; `remove_hook_from_module` ties them again.
    model._tied_parameters = tied  # type: ignore[assignment]
    return model


def _undo_earlier_dispatch(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Load the weights that an earlier dispatch offloaded, except those that stay on disk."""
    index = getattr(model, "_offload_index", {})
    away = [
        joined(prefix, name)
        for prefix, module in model.named_modules()
        if has_offloaded_params(module)
        for name in offload_hook(module).names(module)
    ]
    if away:
        remove_hook_from_module(model, recurse=True)
    for name in away:
        if name in index and str(device_of(name, device_map)) == "disk":
            set_module_tensor_to_device(model, name, "meta")


def _offloaded_weights(
    model: nn.Module,
    places: Mapping[str, Any],
    offload: Mapping[str, bool],
    state_dict: Mapping[str, torch.Tensor] | None,
    offload_dir: str | Path | None,
    offload_index: Mapping[str, Any] | None,
    offload_buffers: bool,
) -> OffloadedWeightsLoader | None:
    """Return the weights of offloaded parts, after writing those that belong on disk."""
    on_disk = [name for name, device in places.items() if device == "disk"]
    in_memory = [name for name, away in offload.items() if away and places[name] != "disk"]
    if not on_disk and not in_memory:
        return None
    own = model.state_dict()
    if on_disk and offload_dir is None and offload_index is None and state_dict is None:
        # Use the weights that `load_checkpoint_in_model` left in the files of the checkpoint.
        offload_index = getattr(model, "_offload_index", {})
        there = extract_submodules_state_dict(own, on_disk)
        # Weights that were written to an offload folder can't be found without that folder.
        kept = {name for name, about in offload_index.items() if MAPPED.keys() & about.keys()}
        lacking = [name for name, one in there.items() if not one.is_meta or name not in kept]
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        if any(name in parameters or offload_buffers for name in lacking):
            raise ConfigurationError(
                f"The device map puts {', '.join(on_disk)} on 'disk', but {lacking[0]!r} has not been"
                " written yet. Pass a folder as offload_dir."
            )
    if on_disk and offload_dir is not None and offload_index is None:
        _write_missing(model, extract_submodules_state_dict(own, on_disk), Path(offload_dir))
    if state_dict is None:
        here = extract_submodules_state_dict(own, in_memory)
        state_dict = {name: tensor.to("cpu") for name, tensor in here.items()}
    return OffloadedWeightsLoader(state_dict, offload_dir if on_disk else None, offload_index)


def _place_lone_tensors(
    model: nn.Module, devices: dict[str, Any], weights: OffloadedWeightsLoader | None
) -> None:
    """Move tensors that the map names directly, and make their modules run on the same device.

    They are usually small, so they stay on the main device instead of being offloaded.
    """
    tensors = dict(named_module_tensors(model, recurse=True, remove_duplicate=False))
    for name in [name for name in devices if name in tensors]:
        device = devices.pop(name)
        value = weights[name] if weights is not None and name in weights else None
        set_module_tensor_to_device(model, name, device, value)
        owner = model.get_submodule(name.rpartition(".")[0])
        if owner is not model and hook_of(owner) is None:
            add_hook_to_module(owner, _EntryHook(device))


class _EntryHook(AlignDevicesHook):
    """Moves only inputs, because the module's tensors are moved individually."""

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | Path,
    device_map: str | Mapping[str, Any] | None = None,
    max_memory: Mapping[DeviceName, float | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    offload_folder: str | Path | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load a checkpoint into an empty model, and distribute the model over the available memory.

    Args:
        model: usually created under `init_empty_weights`.
        checkpoint: see `load_checkpoint_in_model`.
        device_map: a map for `dispatch_model`; or a strategy that creates one: `"auto"` or
            `"balanced"` (equal shares), `"balanced_low_0"` (little on accelerator 0), or
            `"sequential"` (fill one after the other); or a single device; or None to load the
            model without dispatching it.
        max_memory, no_split_module_classes: see `infer_auto_device_map`.
        offload_folder, dtype, offload_state_dict, strict, full_state_dict,
            broadcast_from_rank0: see `load_checkpoint_in_model`.
        offload_buffers, skip_keys, preload_module_classes, force_hooks: see
            `dispatch_model`.

    Raises:
        ConfigurationError, CheckpointError: as for these functions.

    Example:
        from accelerate_core import init_empty_weights

        accelerator.save_model(nn.Linear(8, 2), "weights")
        with init_empty_weights():
            model = nn.Linear(8, 2)  # takes no memory
        model = load_checkpoint_and_dispatch(model, "weights", device_map="auto")
        y = model(x)
    """
    no_split = no_split_module_classes
    chosen: Any = device_map
    if device_map in STRATEGIES:
        if device_map != "sequential":
            sparing = device_map == "balanced_low_0"
            max_memory = get_balanced_memory(model, max_memory, no_split, dtype, low_zero=sparing)
        chosen = infer_auto_device_map(
            model, max_memory, no_split, dtype, offload_buffers=offload_buffers
        )
    elif device_map is not None and not isinstance(device_map, Mapping):
        try:
            chosen = {"": device_map if device_map == "disk" else as_device(device_map)}
        except RuntimeError:
            raise ConfigurationError(
                f"device_map={device_map!r} is neither a device nor a strategy. The strategies are"
                f" {listing(STRATEGIES)}.{did_you_mean(device_map, STRATEGIES)}"
            ) from None
    load_checkpoint_in_model(
        model,
        checkpoint,
        device_map=chosen,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_state_dict=bool(offload_state_dict),
        offload_buffers=offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if chosen is None:
        return model
    return dispatch_model(
        model,
        chosen,
        offload_dir=offload_folder,
        # Use only the weights of this checkpoint, not others that are in the folder.
        offload_index=getattr(model, "_offload_index", None) or None,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a model with offloaded parts, in which every tensor has its data.

    Raises:
        ConfigurationError: a weight is on the meta device, and no hook can load it.
    """
    state = OffloadedState(model)
    return {name: state.read(name) for name in state.tensors}
