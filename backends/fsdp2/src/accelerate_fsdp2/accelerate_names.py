"""Functions of Hugging Face Accelerate for FSDP: checkpoint files, and steps of its `prepare`.

The files have Accelerate's format, so each library can read the other's.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from accelerate_checkpoint import load_shards_into, merge_weights, read_metadata
from accelerate_core.plugin import CheckpointError, PartialState
from accelerate_fsdp2 import quantized, units

_MODEL, _OPTIMIZER = "pytorch_model_fsdp", "optimizer"


# --- checkpoint files -------------------------------------------------------------------------------


def _options(plugin: Any) -> StateDictOptions:
    whole = plugin.state_dict_type == "FULL_STATE_DICT"
    return StateDictOptions(
        full_state_dict=whole, cpu_offload=whole, broadcast_from_rank0=whole, strict=True
    )


def _write(options: Any, accelerator: Any, state: Any, kind: str, place: Path, dcp: bool) -> None:
    """Write one state with Accelerate's file name.

    Args:
        kind: key of the state in a sharded checkpoint.
        place: folder of a sharded checkpoint. The names of other files are derived from it.
    """
    if options.full_state_dict:
        if accelerator.process_index == 0:
            torch.save(state, _whole(place))
    elif dcp:
        import torch.distributed.checkpoint as dist_cp

        place.mkdir(parents=True, exist_ok=True)
        dist_cp.save({kind: state}, storage_writer=dist_cp.FileSystemWriter(place))
    else:
        torch.save(state, f"{place}_rank{accelerator.process_index}.bin")


def _read(
    options: Any, accelerator: Any, own: Callable[[], Any], kind: str, place: Path, dcp: bool
) -> Any:
    """Read a state that `_write` wrote. Rank 0 reads a whole state, and torch sends it to others."""
    if options.full_state_dict:
        return _load(_whole(place)) if accelerator.process_index == 0 else {}
    if not dcp:
        return _load(Path(f"{place}_rank{accelerator.process_index}.bin"))
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    place = place.parent if place.parent.name == place.name else place
    state = {kind: own()}
    values, _ = flatten_state_dict(state)
    plain = {name for name, value in values.items() if not isinstance(value, torch.Tensor)}
    load_shards_into(state, place, read_metadata(place), plain=plain, no_dist=False)
    return state[kind]


def _whole(place: Path) -> Path:
    return place.with_name(f"{place.name.removesuffix('_0')}.bin")


def _load(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist. Use the same state_dict_type and use_dcp as when saving."
        )
    return torch.load(path, map_location="cpu", weights_only=True)


def _adapter_only(model: nn.Module, adapter_only: bool) -> bool:
    return adapter_only and hasattr(model, "peft_config")


def _model_state(model: nn.Module, options: StateDictOptions, adapter_only: bool) -> Any:
    if not _adapter_only(model, adapter_only):
        return get_model_state_dict(model, options=options)
    if options.full_state_dict:
        state = get_model_state_dict(model, options=replace(options, ignore_frozen_params=True))
        return quantized.without_scales(model, state)
    from peft import get_peft_model_state_dict  # type: ignore[import-not-found,unused-ignore]

    return get_peft_model_state_dict(model, adapter_name=model.active_adapter)


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write the weights of one model, whole or in shards, depending on `state_dict_type`.

    Args:
        fsdp_plugin: `accelerator.state.fsdp_plugin`.
        output_dir: the folder to write to. It is created if it doesn't exist.
        model_index: number of the model in the run.
        adapter_only: for a PEFT model, only write the adapter.
        use_dcp: write shards with torch.distributed.checkpoint. False writes one file per rank.
    """
    options = _options(fsdp_plugin)
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    state = _model_state(model, options, adapter_only)
    place = Path(output_dir, f"{_MODEL}_{model_index}")
    _write(options, accelerator, state, "model", place, use_dcp)


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Read weights that `save_fsdp_model` wrote. Returns the missing and unexpected keys.

    Pass the same options as when saving.

    Args:
        fsdp_plugin: `accelerator.state.fsdp_plugin`.
        input_dir: the folder to read from.
        model_index: number of the model in the run.
        adapter_only: for a PEFT model, only read the adapter.
        use_dcp: read shards with torch.distributed.checkpoint. False reads one file per rank.

    Raises:
        CheckpointError: the file does not exist or is damaged.
    """
    accelerator.wait_for_everyone()
    options = _options(fsdp_plugin)
    own = functools.partial(_model_state, model, options, adapter_only)
    place = Path(input_dir, f"{_MODEL}_{model_index}")
    state = _read(options, accelerator, own, "model", place, use_dcp)
    state = quantized.without_scales(model, state)
    if not _adapter_only(model, adapter_only):
        result: Any = set_model_state_dict(model, state, options=options)
    elif options.full_state_dict:
        result = set_model_state_dict(model, state, options=replace(options, strict=False))
    else:
        from peft import set_peft_model_state_dict

        result = set_peft_model_state_dict(model, state, adapter_name=model.active_adapter)
    accelerator.wait_for_everyone()
    return result


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write the state of one optimizer, whole or in shards, depending on `state_dict_type`.

    Args:
        fsdp_plugin: `accelerator.state.fsdp_plugin`.
        output_dir: the folder to write to. It is created if it doesn't exist.
        optimizer_index: number of the optimizer in the run.
        use_dcp: write shards with torch.distributed.checkpoint. False writes one file per rank.
    """
    options = _options(fsdp_plugin)
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    state = get_optimizer_state_dict(model, _inner(optimizer), options=options)
    place = Path(output_dir, f"{_OPTIMIZER}_{optimizer_index}")
    _write(options, accelerator, state, "optimizer", place, use_dcp)


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Read a state that `save_fsdp_optimizer` wrote.

    Pass the same options as when saving.

    Args:
        fsdp_plugin: `accelerator.state.fsdp_plugin`.
        input_dir: the folder to read from.
        optimizer_index: number of the optimizer in the run.
        adapter_only: ignored, for compatibility with Accelerate.
        use_dcp: read shards with torch.distributed.checkpoint. False reads one file per rank.

    Raises:
        CheckpointError: the file does not exist or is damaged.
    """
    accelerator.wait_for_everyone()
    options = _options(fsdp_plugin)
    inner = _inner(optimizer)
    own = functools.partial(get_optimizer_state_dict, model, inner, options=options)
    place = Path(input_dir, f"{_OPTIMIZER}_{optimizer_index}")
    state = _read(options, accelerator, own, "optimizer", place, use_dcp)
    set_optimizer_state_dict(model, inner, state, options=options)
    accelerator.wait_for_everyone()


def _inner(optimizer: Any) -> Any:
    """Return the wrapped optimizer. torch creates its state with a step that must not be counted."""
    return getattr(optimizer, "optimizer", optimizer)


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Merge sharded weights into one file in `output_path`, on the main process.

    Args:
        checkpoint_dir: the folder with the shards.
        safe_serialization: write safetensors. False uses `torch.save`.
        remove_checkpoint_dir: delete the shards afterwards.

    Raises:
        CheckpointError: there are no weights or they are damaged.
    """
    state = PartialState()
    if state.is_main_process:
        merge_weights(
            Path(checkpoint_dir),
            Path(output_path),
            safe_serialization=safe_serialization,
            remove=remove_checkpoint_dir,
        )
    state.wait_for_everyone()


# --- loading whole weights --------------------------------------------------------------------------


def enable_fsdp_ram_efficient_loading() -> None:
    """Set the variables that make Transformers load pretrained weights on rank 0 only."""
    os.environ.setdefault("ACCELERATE_USE_FSDP", "True")
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Set the variable that makes Transformers load pretrained weights on every rank."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "False"


def fsdp2_load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: Mapping[str, Any], cpu_offload: bool = False
) -> nn.Module:
    """Load rank 0's whole weights into a sharded model, and return the model.

    Args:
        full_sd: the state dict on rank 0. It can be empty on other ranks.
        cpu_offload: whether the shards are in host memory.
    """
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload
    )
    set_model_state_dict(model, dict(full_sd), options=options)
    return model


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], Any], model: nn.Module, device: Any
) -> Callable[[nn.Module], Any]:
    """Wrap a function that initialises modules on meta, so that tied weights stay tied.

    Args:
        param_init_fn: initialises the weights of one module.
    """
    tied = {
        id(model.get_parameter(name)) for name in getattr(model, "_tied_weights_keys", None) or ()
    }
    if not tied:
        return param_init_fn
    made: dict[int, Any] = {}

    def initialise(module: nn.Module) -> Any:
        held = {
            name: id(parameter)
            for name, parameter in module.named_parameters(recurse=False)
            if id(parameter) in tied
        }
        module = param_init_fn(module)
        for name, key in held.items():
            setattr(module, name, made.setdefault(key, getattr(module, name)))
        return module

    return initialise


# --- steps of `prepare` -----------------------------------------------------------------------------


def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """Shard one model."""
    prepared: nn.Module = accelerator.prepare_model(model)
    return prepared


def fsdp2_apply_ac(accelerator: Any, model: nn.Module) -> nn.Module:
    """Recompute the activations of each unit in backward."""
    from torch.distributed._composable import checkpoint

    for group in units.find_units(model, accelerator.state.fsdp_plugin):
        for module in group:
            checkpoint(module)
    return model


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: Any, model: nn.Module
) -> Callable[[nn.Module], bool] | None:
    """Return a function that tells whether a module of `model` is a unit, or None without a policy.

    Args:
        fsdp2_plugin: the settings with the policy.
    """
    if fsdp2_plugin.auto_wrap_policy in (None, "no_wrap"):
        return None
    chosen = {id(module) for group in units.find_units(model, fsdp2_plugin) for module in group}
    return lambda module: id(module) in chosen


def fsdp2_switch_optimizer_parameters(
    optimizer: torch.optim.Optimizer, mapping: Mapping[int, Any]
) -> None:
    """Replace an optimizer's parameters by sharded ones.

    Args:
        mapping: `data_ptr` attribute of the old parameter -> new parameter.

    Raises:
        KeyError: a parameter of the optimizer is not in `mapping`.
    """
    for group in optimizer.param_groups:
        group["params"] = [mapping[parameter.data_ptr] for parameter in group["params"]]


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the parts that compilation and activation checkpointing add to parameter names.

    Args:
        named_params: name -> parameter.
    """
    wrappers = ("_orig_mod", "_checkpoint_wrapped_module")
    return {
        ".".join(part for part in name.split(".") if part not in wrappers): value
        for name, value in named_params.items()
    }


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Return a gradient scaler."""
    return torch.amp.GradScaler(**kwargs)
