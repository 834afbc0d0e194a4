"""Save and load the state of a run in Accelerate's files, for scripts without an Accelerator.

`Accelerator.save_state` writes whole checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from accelerate_checkpoint import capture_rng_state, restore_rng_state
from accelerate_core.distributed.process import current_runtime
from accelerate_core.plugin import CheckpointError, ConfigurationError, listing, warn
from accelerate_drop_in import constants
from accelerate_drop_in.other import load, save

_Path = str | os.PathLike[str]


def _numbered(name: str, number: int) -> str:
    stem, dot, suffix = name.partition(".")
    return f"{stem}_{number}{dot}{suffix}" if number else name


def save_accelerator_state(
    output_dir: _Path,
    model_states: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    step: int,
    scaler: Any = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Write weights, optimizers, schedulers, loaders, scaler and random states; return the folder.

    Args:
        model_states: state dicts.
        process_index: rank of this process, for the name of the file with its random states.
        step: a number that `load_accelerator_state` returns.
        save_on_each_node: the first process on each machine writes, instead of only the main process.
        safe_serialization: write weights with safetensors; False writes them with `torch.save`.
    """
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    name = constants.SAFE_WEIGHTS_NAME if safe_serialization else constants.WEIGHTS_NAME
    for number, state in enumerate(model_states):
        path = folder / _numbered(name, number)
        save(state, path, save_on_each_node, safe_serialization=safe_serialization)
    for name, owners in (
        (f"{constants.OPTIMIZER_NAME}.bin", optimizers),
        (f"{constants.SCHEDULER_NAME}.bin", schedulers),
        ("dl_state_dict.bin", dataloaders),
        (constants.SCALER_NAME, [scaler] if scaler is not None else []),
    ):
        for number, owner in enumerate(owners):
            if hasattr(owner, "state_dict"):
                save(owner.state_dict(), folder / _numbered(name, number), save_on_each_node)
    states = {"step": step, **capture_rng_state([current_runtime().device])}
    torch.save(states, folder / f"{constants.RNG_STATE_NAME}_{process_index}.pkl")
    return folder


def load_accelerator_state(
    input_dir: _Path,
    models: Sequence[Any],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    scaler: Any = None,
    map_location: str | None = None,
    load_kwargs: Mapping[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Load a state that `save_accelerator_state` or Hugging Face Accelerate wrote.

    Args:
        map_location: the device for optimizer states, "cpu" or "on_device".
        load_kwargs: arguments for `torch.load`.
        load_model_func_kwargs: arguments for the models' `load_state_dict`.

    Returns:
        `{"step": ...}`, or an empty dict if no step was saved.

    Raises:
        ConfigurationError: `map_location` is invalid.
        CheckpointError: a file is missing.
    """
    if map_location not in (None, "cpu", "on_device"):
        raise ConfigurationError(f"map_location={map_location!r} must be 'cpu' or 'on_device'.")
    place = current_runtime().device if map_location == "on_device" else torch.device("cpu")
    folder = Path(input_dir)
    how = dict(load_kwargs or {})
    for number, model in enumerate(models):
        path = folder / _numbered(constants.SAFE_WEIGHTS_NAME, number)
        if path.exists():
            from safetensors.torch import load_model

            load_model(model, path, device=str(place), **load_model_func_kwargs)
        else:
            state = _read(folder / _numbered(constants.WEIGHTS_NAME, number), map_location=place)
            model.load_state_dict(state, **load_model_func_kwargs)
    for name, owners in (
        (f"{constants.OPTIMIZER_NAME}.bin", optimizers),
        (f"{constants.SCHEDULER_NAME}.bin", schedulers),
        (constants.SCALER_NAME, [scaler] if scaler is not None else []),
    ):
        for number, owner in enumerate(owners):
            path = folder / _numbered(name, number)
            owner.load_state_dict(_read(path, map_location=place, **how))
    for number, loader in enumerate(dataloaders):
        path = folder / _numbered("dl_state_dict.bin", number)
        if hasattr(loader, "load_state_dict") and path.exists():
            loader.load_state_dict(load(path, **how))
    return _random_states(folder / f"{constants.RNG_STATE_NAME}_{process_index}.pkl")


def _random_states(path: Path) -> dict[str, Any]:
    if not path.exists():
        warn(f"{path} does not exist, so the random states of this process are not restored.")
        return {}
    states = load(path)
    missed = restore_rng_state(states)
    if missed:
        warn(f"Random states in {path} could not be restored here: {listing(missed)}.")
    return {"step": states["step"]} if "step" in states else {}


def _read(path: Path, **how: Any) -> Any:
    if not path.is_file():
        raise CheckpointError(f"The checkpoint file {path} does not exist.")
    return load(path, **how)


def save_custom_state(
    obj: Any, path: _Path, index: int = 0, save_on_each_node: bool = False
) -> None:
    """Write an object's `state_dict()` to `custom_checkpoint_{index}.pkl` in a folder."""
    save(obj.state_dict(), Path(path, f"custom_checkpoint_{index}.pkl"), save_on_each_node)


def load_custom_state(obj: Any, path: _Path, index: int = 0) -> None:
    """Load an object's state from that file, which must be trusted because it can run any code."""
    file = Path(path, f"custom_checkpoint_{index}.pkl")
    obj.load_state_dict(_read(file, map_location="cpu", weights_only=False))
