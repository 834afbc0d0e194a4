"""`save_state` and `load_state`, in their plain form."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accelerate_core.checkpoint import files, rng
from accelerate_core.checkpoint.model import load_weights, save_weights
from accelerate_core.errors import CheckpointError

if TYPE_CHECKING:
    from accelerate_core.accelerator import Accelerator

__all__ = ["load_state", "save_state"]

_NUMBERED = re.compile(r"checkpoint_(\d+)")


def save_state(
    accelerator: Accelerator, output_dir: Any, safe_serialization: bool, options: dict[str, Any]
) -> str:
    """Write models, optimizers, schedulers, scaler, generators, loaders and registered objects.

    Returns:
        The directory.
    """
    automatic = accelerator.project_configuration.automatic_checkpoint_naming
    directory = _numbered_directory(accelerator) if automatic else _named(output_dir)
    if automatic and directory.exists():
        raise CheckpointError(
            f"{directory} is there already; set ProjectConfiguration(iteration=...) beyond it."
        )
    accelerator.settle_scale()
    # Ranks meet only after everyone has looked: nobody sees the directory of another.
    accelerator.wait_for_everyone()
    directory.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
    _save_models(accelerator, directory, safe_serialization)
    if accelerator.saves_here:
        _save_shared(accelerator, directory)
    mine = directory / f"{files.RNG}_{accelerator.process_index}.pkl"
    files.write(mine, lambda path: torch.save(_own_state(accelerator), path))
    for key, function, names in accelerator.plugins.implementations("on_save"):
        contributed = directory / key.replace(":", "_")
        if "directory" in names:
            contributed.mkdir(exist_ok=True)
        accelerator.plugins.call_one(
            "on_save", key, function, names, accelerator=accelerator, directory=contributed
        )
    accelerator.wait_for_everyone()
    if automatic:
        _remove_oldest(accelerator, directory)
        accelerator.project_configuration.iteration += 1
    return str(directory)


def load_state(
    accelerator: Accelerator,
    input_dir: Any,
    load_kwargs: dict[str, Any],
    trust: bool,
    options: dict[str, Any],
) -> None:
    """Read what `save_state` wrote into the same objects.

    Raises:
        CheckpointError: the directory or a file of it is missing or unreadable.
    """
    directory = _latest(accelerator) if input_dir is None else Path(input_dir).expanduser()
    if not directory.is_dir():
        raise CheckpointError(f"There is no checkpoint directory {directory}.")
    accelerator.settle_scale()  # what is pending belongs to the state that is replaced
    _load_models(accelerator, directory, options)
    optimizers, schedulers, loaders = (
        accelerator.optimizers,
        accelerator.schedulers,
        accelerator.loaders,
    )
    if "checkpoint" not in accelerator.backend.owns:
        for index, optimizer in enumerate(optimizers):
            state = files.read(
                directory / files.numbered(files.OPTIMIZER, index, ".bin"),
                trust=trust,
                **load_kwargs,
            )
            accelerator.hooks.load_optimizer_state(accelerator, optimizer.optimizer, state)
    for index, scheduler in enumerate(schedulers):
        path = directory / files.numbered(files.SCHEDULER, index, ".bin")
        scheduler.load_state_dict(files.read(path, trust=trust))
    for index, loader in enumerate(loaders):
        path = directory / files.numbered(files.SAMPLER, index, ".bin")
        if hasattr(loader, "load_state_dict") and path.exists():
            loader.load_state_dict(files.read(path, trust=trust))
    if accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(files.read(directory / files.SCALER, trust=trust))
    for index, obj in enumerate(accelerator.registered_objects):
        obj.load_state_dict(files.read(directory / f"{files.CUSTOM}_{index}.pkl", trust=trust))
    _load_own(accelerator, directory, trust)
    for key, function, names in accelerator.plugins.implementations("on_load"):
        accelerator.plugins.call_one(
            "on_load",
            key,
            function,
            names,
            accelerator=accelerator,
            directory=directory / key.replace(":", "_"),
        )
    found = _NUMBERED.fullmatch(directory.name)
    if found and accelerator.project_configuration.automatic_checkpoint_naming:
        accelerator.project_configuration.iteration = int(found[1]) + 1


def _named(output_dir: Any) -> Path:
    if output_dir is None:
        raise CheckpointError(
            "save_state needs an output_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)."
        )
    return Path(output_dir).expanduser()


def _root(accelerator: Accelerator) -> Path:
    project = accelerator.project_dir
    if project is None:
        raise CheckpointError("Automatic checkpoint naming needs a project_dir.")
    return Path(project).expanduser() / "checkpoints"


def _numbered_directory(accelerator: Accelerator) -> Path:
    return _root(accelerator) / f"checkpoint_{accelerator.save_iteration}"


def _checkpoints(root: Path) -> list[tuple[int, Path]]:
    if not root.is_dir():
        return []
    found = ((_NUMBERED.fullmatch(path.name), path) for path in root.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match)


def _latest(accelerator: Accelerator) -> Path:
    """Return the newest checkpoint; rank 0 decides for all."""
    names = [str(path) for _, path in _checkpoints(_root(accelerator))]
    chosen = accelerator.communicator.broadcast_object(names[-1] if names else None)
    if chosen is None:
        raise CheckpointError(f"There is no checkpoint in {_root(accelerator)} to load.")
    return Path(chosen)


def _remove_oldest(accelerator: Accelerator, newest: Path) -> None:
    """Keep `total_limit` checkpoints, now that the new one stands."""
    limit = accelerator.project_configuration.total_limit
    if limit is None or not accelerator.saves_here:
        return
    earlier = [path for _, path in _checkpoints(_root(accelerator)) if path != newest]
    for path in earlier[: max(len(earlier) - (limit - 1), 0)]:
        shutil.rmtree(path)


def _save_models(accelerator: Accelerator, directory: Path, safe_serialization: bool) -> None:
    if "checkpoint" in accelerator.backend.owns:
        return
    models = list(accelerator.models)
    weights = [accelerator.hooks.model_state(accelerator, model) for model in models]
    for hook in list(accelerator.save_state_pre_hooks.values()):
        hook(models, weights, str(directory))  # may take models out of both lists
    if accelerator.saves_here:
        for index, state in enumerate(weights):
            stem = files.numbered(files.MODEL, index, "")
            save_weights(state, directory, stem=stem, safe_serialization=safe_serialization)


def _load_models(accelerator: Accelerator, directory: Path, options: dict[str, Any]) -> None:
    if "checkpoint" in accelerator.backend.owns:
        return
    models = list(accelerator.models)
    for hook in list(accelerator.load_state_pre_hooks.values()):
        hook(models, str(directory))
    strict = bool(options.get("strict", True))
    for index, model in enumerate(models):
        stem = files.numbered(files.MODEL, index, "")
        state = load_weights(directory, stem, accelerator.inner_model(model))
        accelerator.hooks.load_model_state(accelerator, model, state, strict)


def _save_shared(accelerator: Accelerator, directory: Path) -> None:
    """Write what is the same on every rank."""

    def put(name: str, state: Any) -> None:
        files.write(directory / name, lambda path: torch.save(state, path))

    if "checkpoint" not in accelerator.backend.owns:
        for index, optimizer in enumerate(accelerator.optimizers):
            state = accelerator.hooks.optimizer_state(accelerator, optimizer.optimizer)
            put(files.numbered(files.OPTIMIZER, index, ".bin"), state)
    for index, scheduler in enumerate(accelerator.schedulers):
        put(files.numbered(files.SCHEDULER, index, ".bin"), scheduler.state_dict())
    for index, loader in enumerate(accelerator.loaders):
        if hasattr(loader, "state_dict"):
            put(files.numbered(files.SAMPLER, index, ".bin"), loader.state_dict())
    if accelerator.scaler is not None:
        put(files.SCALER, accelerator.scaler.state_dict())
    for index, obj in enumerate(accelerator.registered_objects):
        put(f"{files.CUSTOM}_{index}.pkl", obj.state_dict())


def _own_state(accelerator: Accelerator) -> dict[str, Any]:
    return {"step": accelerator.step, "random": rng.capture()}


def _load_own(accelerator: Accelerator, directory: Path, trust: bool) -> None:
    path = directory / f"{files.RNG}_{accelerator.process_index}.pkl"
    if not path.exists() and accelerator.process_index > 0:
        accelerator.note_once(
            f"{directory} was saved by fewer processes: rank {accelerator.process_index} "
            "keeps its own random state."
        )
        path = directory / f"{files.RNG}_0.pkl"
        accelerator.step = files.read(path, trust=trust)["step"]
        return
    state = files.read(path, trust=trust)
    accelerator.step = state["step"]
    rng.restore(state["random"])
