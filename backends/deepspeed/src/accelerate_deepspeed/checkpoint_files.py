"""Read DeepSpeed's checkpoint files, unpickling only tensors and an allow-list of classes.

deepspeed doesn't need to be installed. Its classes in the files are then replaced by empty ones.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict, defaultdict
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from accelerate_core.plugin import CheckpointError


class _Opaque:
    """Replaces an object of DeepSpeed whose contents are not needed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _Stage(int, Enum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


#: Classes that DeepSpeed stores in its files. They hold numbers and run no code when created.
_NAMES = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.utils.tensor_fragment.tensor_fragment",
)


#: Containers in these files.
_CONTAINERS = (OrderedDict, defaultdict, dict, set)


def _allowed() -> list[Any]:
    found: list[Any] = [*_CONTAINERS]
    for name in _NAMES:
        module, _, attribute = name.rpartition(".")
        substitute: Any = _Stage if attribute == "ZeroStageEnum" else _Opaque
        found.append((getattr(sys.modules.get(module), attribute, substitute), name))
    return found


def read_file(path: Path | str, map_location: Any = "cpu") -> Any:
    """Read a file.

    Raises:
        CheckpointError: the file cannot be read, or contains objects that are not on the allow-list.
    """
    try:
        with torch.serialization.safe_globals(_allowed()):
            return torch.load(path, map_location=map_location, weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from None
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path} is damaged, or contains Python objects that are not unpickled: {first}"
        ) from None


def check_file(path: Path) -> None:
    """Check a file before DeepSpeed's own readers, which unpickle anything, read it.

    Raises:
        CheckpointError: the file is damaged, or contains objects that are not on the allow-list.
    """
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    usual = {*_NAMES, *(f"{kind.__module__}.{kind.__name__}" for kind in _CONTAINERS)}
    for name in named:
        if name not in usual:
            raise CheckpointError(
                f"{path} contains the Python object {name}, which is not unpickled."
            )


# --- weights in fp32 ------------------------------------------------------------------------------


def merge(directory: Path) -> dict[str, torch.Tensor]:
    """Return the whole weights of an engine's checkpoint in fp32, by name.

    The layout of the flat groups is the same as in DeepSpeed's `zero_to_fp32`. With stages 1 and 2,
    a group is the concatenation of all ranks' partitions. With stage 3, each parameter is split into
    one piece per rank.

    Args:
        directory: contains `*_model_states.pt` and, for stages 1 to 3, `*_optim_states.pt`.

    Raises:
        CheckpointError: files are missing, damaged, or of a kind that cannot be merged.
    """
    models = _model_files(directory)
    states = sorted(directory.glob("*_optim_states.pt"), key=_rank_of)
    if len({path.name[path.name.index("mp_rank_") :] for path in models}) > 1:
        raise CheckpointError(
            f"{directory} was saved by several tensor parallel ranks, which cannot be merged. Save "
            "whole weights with accelerator.save_model during the run instead."
        )
    model = read_file(models[0])
    if not states:
        return {name: _fp32(value) for name, value in _tensors(model["module"]).items()}
    optimizers = [read_file(path)["optimizer_state_dict"] for path in states]
    stage = int(optimizers[0].get("zero_stage", 0))
    counts = optimizers[0].get("partition_count", len(optimizers))
    expected = max(counts) if isinstance(counts, list | tuple) else int(counts)
    if len(optimizers) != expected:
        raise CheckpointError(
            f"{directory} has {len(optimizers)} of {expected} files *_optim_states.pt. The others "
            "are missing."
        )
    module = _tensors(model.get("module") or {})
    if stage == 3:
        merged = _merge_3(model, optimizers) | _frozen_3(models)
        buffers = model.get("buffer_names") or ()
        merged |= {name: _fp32(module[name]) for name in buffers if name in module}
    else:  # frozen parameters are in no group, and stage 1 only saves them with the model
        merged = _merge_12(model, optimizers)
        others = module | (model.get("frozen_param_fragments") or {})
        merged |= {name: _fp32(value) for name, value in others.items() if name not in merged}
    for pair in model.get("shared_params") or ():
        name, owner = (pair[0], pair[1]) if not isinstance(pair, str) else (pair, None)
        if owner in merged:
            merged[name] = merged[owner]
    return merged


def beside_the_optimizer(directory: Path) -> dict[str, torch.Tensor]:
    """Return the buffers and frozen parameters in an engine's checkpoint, by name."""
    models = _model_files(directory)
    model = read_file(models[0])
    module = _tensors(model.get("module") or {})
    found = {name: module[name] for name in model.get("buffer_names") or () if name in module}
    if any("zero_pp_rank" in path.name for path in models):
        return found | _frozen_3(models)
    if fragments := model.get("frozen_param_fragments"):
        found |= fragments
        return found
    trained = {name for group in model.get("param_shapes") or () for name in group}
    return found | {name: value for name, value in module.items() if name not in trained}


def _model_files(directory: Path) -> list[Path]:
    """Return the files with the model's state, sorted by rank."""
    found = sorted(directory.glob("*mp_rank_*_model_states.pt"), key=_rank_of)
    if not found:
        raise CheckpointError(
            f"{directory} is not a checkpoint of a DeepSpeed engine: it has no *_model_states.pt."
        )
    return found


def _merge_12(model: dict[str, Any], optimizers: list[Any]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for group, shapes in enumerate(model["param_shapes"]):
        parts = [one["single_partition_of_fp32_groups"][group].flatten() for one in optimizers]
        found |= _cut([torch.cat(parts)], shapes)
    return found


def _merge_3(model: dict[str, Any], optimizers: list[Any]) -> dict[str, torch.Tensor]:
    flats = [torch.cat([part.flatten() for part in one["fp32_flat_groups"]]) for one in optimizers]
    return _cut(flats, {n: shape for group in model["param_shapes"] for n, shape in group.items()})


def _cut(flats: list[torch.Tensor], shapes: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Split flat tensors, which contain equal pieces of each parameter, into whole parameters."""
    found: dict[str, torch.Tensor] = {}
    offset = 0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        end = offset - (-count // len(flats))
        if any(end > flat.numel() for flat in flats):
            raise CheckpointError(
                f"The weights end before {name!r}, so the files are not from the same checkpoint."
            )
        pieces = [flat[offset:end] for flat in flats]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        found[name] = whole[:count].reshape(torch.Size(shape)).float()
        offset = end
    return found


def _frozen_3(models: list[Path]) -> dict[str, torch.Tensor]:
    ranks = [read_file(path) for path in models]
    found = {}
    for name, shape in (ranks[0].get("frozen_param_shapes") or {}).items():
        pieces = torch.cat([one["frozen_param_fragments"][name].flatten() for one in ranks])
        found[name] = _fp32(pieces[: torch.Size(shape).numel()].reshape(torch.Size(shape)))
    return found


def _fp32(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.is_floating_point() else value


def _tensors(state: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _rank_of(path: Path) -> int:
    found = re.search(r"zero_pp_rank_(\d+)_", path.name)
    return int(found.group(1)) if found else 0
