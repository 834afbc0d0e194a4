"""Weights for others to load: safetensors, in shards with an index."""

from __future__ import annotations

import os
import pickle
import re
import secrets
import tempfile
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from accelerate_checkpoint import files
from accelerate_checkpoint.files import sync_directory
from accelerate_checkpoint.weights import (
    checkpoint_files,
    clean_state_dict_for_safetensors,
    load_state_dict,
)
from accelerate_checkpoint.writer import write_weights
from accelerate_core.errors import CheckpointError

if TYPE_CHECKING:
    from accelerate_checkpoint.training_state import TrainingState

__all__ = ["load_weights", "save_model", "save_object", "save_weights", "weights_layout"]


def save_weights(
    state: Mapping[str, Any],
    directory: Path,
    *,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Write a state dict as `model.safetensors`, or in shards of at most `max_shard_size` bytes.

    Each file is written beside its place first; shards of an earlier save are removed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    whole = clean_state_dict_for_safetensors(state) if safe_serialization else dict(state)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=directory) as beside:
        made = write_weights(Path(beside), whole, files.MODEL, max_shard_size, safe_serialization)
        # The index comes last: it is what makes shards a model.
        for name in sorted(made, key=lambda name: name.endswith(".json")):
            os.replace(Path(beside, name), directory / name)
    sync_directory(directory)
    _remove_earlier(directory, keep=set(made))


_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")


def _remove_earlier(directory: Path, keep: set[str]) -> None:
    """Remove weights of an earlier save: they would load as if they were current."""
    for path in directory.iterdir():
        if _WEIGHTS.fullmatch(path.name) and path.name not in keep:
            path.unlink()


def load_weights(
    directory: Path,
    into: torch.nn.Module,
    stem: str = files.MODEL,
    listed: Container[str] | None = None,
) -> dict[str, Any]:
    """Read what `save_weights` wrote; names tied in `into` are filled in, as only one was kept.

    Args:
        stem: what the names of the files begin with.
        listed: the files that may be read; all, if there is no manifest.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
    """
    state: dict[str, Any] = {}
    for path in _files(directory, stem, listed):
        try:
            state.update(load_state_dict(path))
        except (SafetensorError, RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{path} cannot be read: {files.first_line(error)}") from error
    state = _own_names(state, into)
    names: dict[tuple[Any, ...], str] = {}
    own = into.state_dict(keep_vars=True)
    for name, tensor in own.items():
        if name in state and isinstance(tensor, torch.Tensor):
            names[_place(tensor)] = name
    for name, tensor in own.items():
        if name not in state and isinstance(tensor, torch.Tensor) and _place(tensor) in names:
            state[name] = state[names[_place(tensor)]]
    return state


def weights_layout(
    directory: Path, stem: str, into: torch.nn.Module, listed: Container[str] | None = None
) -> dict[str, list[int]] | None:
    """Return names and shapes without reading the weights, None if they are no safetensors."""
    layout: dict[str, Any] = {}
    for path in _files(directory, stem, listed):
        if path.suffix != ".safetensors":
            return None
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - the handle is no mapping
                    layout[name] = list(file.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {files.first_line(error)}") from error
    layout = _own_names(layout, into)
    own = into.state_dict(keep_vars=True)
    kept = {_place(t) for n, t in own.items() if n in layout and isinstance(t, torch.Tensor)}
    for name, tensor in own.items():
        if name in layout:
            continue
        if not isinstance(tensor, torch.Tensor):  # extra state, which safetensors cannot hold
            return None
        if _place(tensor) in kept:
            layout[name] = list(tensor.shape)
    return layout


#: What wrappers put before the names; the peer keeps the wrapped model's state dict.
_PREFIXES = ("module.", "_orig_mod.")


def _own_names(state: dict[str, Any], into: torch.nn.Module) -> dict[str, Any]:
    own = into.state_dict(keep_vars=True)
    while state and not any(name in own for name in state):
        prefix = next((p for p in _PREFIXES if all(n.startswith(p) for n in state)), None)
        if prefix is None:
            break
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()


def _files(directory: Path, stem: str, listed: Container[str] | None) -> list[Path]:
    """Return the files of one model's weights; with a manifest, only such as it vouches for."""
    index = stem.removeprefix(files.MODEL)
    for name in (f"{stem}.safetensors", f"pytorch_model{index}.bin"):
        for path in (directory / name, directory / f"{name}.index.json"):
            if path.exists() if listed is None else path.name in listed:
                found = checkpoint_files(path)
                strange = [
                    one.name for one in found if listed is not None and one.name not in listed
                ]
                if strange:
                    raise CheckpointError(
                        f"{path} names {strange[0]}, which the manifest does not."
                    )
                return found
    raise CheckpointError(f"The checkpoint {directory} has no {stem}.safetensors.")


def save_model(
    state: TrainingState,
    model: torch.nn.Module,
    save_directory: Any,
    max_shard_size: int | str,
    safe_serialization: bool,
) -> None:
    """Write the weights of a model once, where `load_checkpoint_in_model` finds them.

    Raises:
        CheckpointError: the path is a file, or the model has weights on the meta device.
    """
    directory = Path(save_directory)
    if directory.is_file():
        raise CheckpointError(f"save_model needs a directory, and {directory} is a file.")
    weights = state.whole_model_state(model)
    if any(t.device.type == "meta" for t in weights.values() if isinstance(t, torch.Tensor)):
        raise CheckpointError(
            "The model has weights on the meta device, so there is nothing to save."
        )
    if state.saves_here:
        save_weights(
            weights,
            directory,
            max_shard_size=max_shard_size,
            safe_serialization=safe_serialization,
        )


def save_object(obj: Any, f: Any, safe_serialization: bool) -> None:
    """Write one object with torch or safetensors: to a path, or into an open file."""
    if safe_serialization:
        state = clean_state_dict_for_safetensors(dict(obj))
        if hasattr(f, "write"):
            from safetensors.torch import save as to_bytes

            f.write(to_bytes(state, metadata={"format": "pt"}))
        else:
            _beside(Path(f), lambda path: files.write_safetensors(path, state, {"format": "pt"}))
    elif hasattr(f, "write"):
        torch.save(obj, f)
    else:
        _beside(Path(f), lambda path: files.write_torch(path, obj))


def _beside(path: Path, put: Callable[[Path], Any]) -> None:
    """Write a file beside `path`, then rename: `path` is old or new, never half."""
    beside = path.with_name(f".{path.name}.saving-{secrets.token_hex(6)}")
    try:
        put(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
