"""Functions of Hugging Face Accelerate around FSDP: its checkpoint files, and steps of its `prepare`.

The files are those that it writes, so that either reads what the other has written.
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

from accelerate_checkpoint import SafeReader, merge_weights, read_metadata
from accelerate_core.plugin import CheckpointError, PartialState
from accelerate_fsdp2 import units

_MODEL, _OPTIMIZER = "pytorch_model_fsdp", "optimizer"


# --- checkpoint files -------------------------------------------------------------------------------


def _options(plugin: Any) -> StateDictOptions:
    whole = plugin.state_dict_type == "FULL_STATE_DICT"
    return StateDictOptions(
        full_state_dict=whole, cpu_offload=whole, broadcast_from_rank0=whole, strict=True
    )


def _write(options: Any, accelerator: Any, state: Any, kind: str, place: Path, dcp: bool) -> None:
    """Write one state under Accelerate's name for it.

    Args:
        kind: key of the state in a sharded checkpoint.
        place: folder of a sharded checkpoint; other files are named by it.
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
    """Read what `_write` wrote; a whole state on rank 0 only, which torch sends to the others."""
    if options.full_state_dict:
        return _load(_whole(place)) if accelerator.process_index == 0 else {}
    if not dcp:
        return _load(Path(f"{place}_rank{accelerator.process_index}.bin"))
    import torch.distributed.checkpoint as dist_cp

    place = place.parent if place.parent.name == place.name else place
    state = {kind: own()}
    dist_cp.load(state, storage_reader=SafeReader(place, read_metadata(place)))
    return state[kind]


def _whole(place: Path) -> Path:
    return place.with_name(f"{place.name.removesuffix('_0')}.bin")


def _load(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(
            f"{path} is not there. Load with the state_dict_type and use_dcp that were saved with."
        )
    return torch.load(path, map_location="cpu", weights_only=True)


def _adapter_only(model: nn.Module, adapter_only: bool) -> bool:
    return adapter_only and hasattr(model, "peft_config")


def _model_state(model: nn.Module, options: StateDictOptions, adapter_only: bool) -> Any:
    if not _adapter_only(model, adapter_only):
        return get_model_state_dict(model, options=options)
    if options.full_state_dict:
        return get_model_state_dict(model, options=replace(options, ignore_frozen_params=True))
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
    """Write the weights of one model: whole, or in shards, as `state_dict_type` says.

    Args:
        fsdp_plugin: `accelerator.state.fsdp_plugin`.
        model_index: place of the model among those of the run.
        adapter_only: of a peft model, only what is trained.
        use_dcp: write shards with torch.distributed.checkpoint; False: a file of each rank.
        output_dir: a folder, made where it is missing.
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
    """Read what `save_fsdp_model` wrote; return the missing and unexpected keys.

    Args:
        fsdp_plugin: its `state_dict_type` says which form is read.
        input_dir: the folder that was written to.
        model_index: which of several models.
        adapter_only: read the weights of adapters alone.
        use_dcp: shards by torch.distributed.checkpoint; False: a file of each rank.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
    """
    accelerator.wait_for_everyone()
    options = _options(fsdp_plugin)
    own = functools.partial(_model_state, model, options, adapter_only)
    place = Path(input_dir, f"{_MODEL}_{model_index}")
    state = _read(options, accelerator, own, "model", place, use_dcp)
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
    """Write the state of one optimizer, as `save_fsdp_model` does the weights.

    Args:
        fsdp_plugin: its `state_dict_type` says which form is written.
        output_dir: a folder, made where it is missing.
        optimizer_index: which of several optimizers.
        use_dcp: shards by torch.distributed.checkpoint; False: a file of each rank.
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
    """Read what `save_fsdp_optimizer` wrote; `adapter_only` changes nothing here.

    Args:
        fsdp_plugin: its `state_dict_type` says which form is read.
        input_dir: the folder that was written to.
        optimizer_index: which of several optimizers.
        use_dcp: shards by torch.distributed.checkpoint; False: a file of each rank.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
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
    """Return the user's own: torch makes its state by a step, which the wrapper would count."""
    return getattr(optimizer, "optimizer", optimizer)


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Write sharded weights as one file into `output_path`, on the main process.

    Args:
        checkpoint_dir: the folder with the shards.
        safe_serialization: write safetensors, else by `torch.save`.
        remove_checkpoint_dir: delete the shards afterwards.

    Raises:
        CheckpointError: there are no weights, or they are damaged.
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
    """Let only rank 0 load pretrained weights, as transformers reads it from the environment."""
    os.environ.setdefault("ACCELERATE_USE_FSDP", "True")
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Let every rank load pretrained weights."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "False"


def fsdp2_load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: Mapping[str, Any], cpu_offload: bool = False
) -> nn.Module:
    """Give a sharded model the whole weights that rank 0 has; return it.

    Args:
        full_sd: on the others it may be empty.
        cpu_offload: the shards live in host memory.
    """
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload
    )
    set_model_state_dict(model, dict(full_sd), options=options)
    return model


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], Any], model: nn.Module, device: Any
) -> Callable[[nn.Module], Any]:
    """Wrap what makes the weights of a module on meta, so that tied ones stay tied.

    Args:
        param_init_fn: makes the weights of one module.
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
    """Compute the activations of each unit again in backward."""
    from torch.distributed._composable import checkpoint

    for group in units.find_units(model, accelerator.state.fsdp_plugin):
        for module in group:
            checkpoint(module)
    return model


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: Any, model: nn.Module
) -> Callable[[nn.Module], bool] | None:
    """Return a function that says whether a module of `model` is a unit, None without a policy.

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
    """Put sharded parameters into an optimizer.

    Args:
        mapping: `data_ptr` of what the optimizer holds -> what takes its place. What is held may be
            anything with that attribute.

    Raises:
        KeyError: it holds one that is not in there.
    """
    for group in optimizer.param_groups:
        group["params"] = [mapping[parameter.data_ptr] for parameter in group["params"]]


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping with names as they were before compiling and checkpointing.

    Args:
        named_params: name -> parameter.
    """
    wrappers = ("_orig_mod", "_checkpoint_wrapped_module")
    return {
        ".".join(part for part in name.split(".") if part not in wrappers): value
        for name, value in named_params.items()
    }


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Make a gradient scaler."""
    return torch.amp.GradScaler(**kwargs)
