"""Weights for others to load: safetensors, in shards with an index."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from accelerate_core.checkpoint import files
from accelerate_core.errors import CheckpointError
from accelerate_core.helpers.weights import (
    checkpoint_files,
    clean_state_dict_for_safetensors,
    load_state_dict,
    shard_state_dict,
)

if TYPE_CHECKING:
    from accelerate_core.accelerator import Accelerator

__all__ = ["load_weights", "save_model", "save_object", "save_weights"]


def save_weights(
    state: Mapping[str, Any],
    directory: Path,
    *,
    stem: str = files.MODEL,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Write a state dict as `model.safetensors`, or in shards of at most `max_shard_size` bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    suffix = ".safetensors" if safe_serialization else ".bin"
    name = stem if safe_serialization else stem.replace(files.MODEL, "pytorch_model", 1)
    tensors: Mapping[str, Any] = (
        clean_state_dict_for_safetensors(dict(state)) if safe_serialization else state
    )
    shards, index = shard_state_dict(dict(tensors), max_shard_size, f"{name}{{suffix}}{suffix}")
    _remove_earlier(directory, name, suffix, keep=set(shards))
    for filename, shard in shards.items():
        files.write(directory / filename, partial(_save, shard, safe=safe_serialization))
    if index is not None:
        text = json.dumps(index, indent=2, sort_keys=True)
        files.write(directory / f"{name}{suffix}.index.json", lambda path: _text(path, text))


def _save(shard: dict[str, Any], path: Path, *, safe: bool) -> None:
    if safe:
        save_file({k: v.contiguous() for k, v in shard.items()}, path, metadata={"format": "pt"})
    else:
        torch.save(shard, path)


def _text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _remove_earlier(directory: Path, name: str, suffix: str, keep: set[str]) -> None:
    """Remove shards of an earlier save with another number of them: they would load as if current."""
    pattern = re.compile(
        rf"{re.escape(name)}(-\d{{5}}-of-\d{{5}})?{re.escape(suffix)}(\.index\.json)?"
    )
    for path in directory.iterdir():
        if pattern.fullmatch(path.name) and path.name not in keep:
            path.unlink()


def load_weights(directory: Path, stem: str, into: torch.nn.Module) -> dict[str, Any]:
    """Read what `save_weights` wrote; names tied in `into` are filled in, as only one was kept.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
    """
    state: dict[str, Any] = {}
    for path in checkpoint_files(_find(directory, stem)):
        try:
            state.update(load_state_dict(path))
        except (SafetensorError, RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    names: dict[tuple[Any, ...], str] = {}
    own = into.state_dict(keep_vars=True)
    for name, tensor in own.items():
        if name in state and isinstance(tensor, torch.Tensor):
            names[_place(tensor)] = name
    for name, tensor in own.items():
        if name not in state and isinstance(tensor, torch.Tensor) and _place(tensor) in names:
            state[name] = state[names[_place(tensor)]]
    return state


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()


def _find(directory: Path, stem: str) -> Path:
    index = stem.removeprefix(files.MODEL)
    for name in (f"{stem}.safetensors", f"pytorch_model{index}.bin"):
        for path in (directory / name, directory / f"{name}.index.json"):
            if path.exists():
                return path
    raise CheckpointError(f"The checkpoint {directory} has no {stem}.safetensors.")


def save_model(
    accelerator: Accelerator,
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
    state = accelerator.get_state_dict(model)
    if any(t.device.type == "meta" for t in state.values() if isinstance(t, torch.Tensor)):
        raise CheckpointError(
            "The model has weights on the meta device, so there is nothing to save."
        )
    if accelerator.saves_here:
        save_weights(
            state, directory, max_shard_size=max_shard_size, safe_serialization=safe_serialization
        )


def save_object(obj: Any, f: Any, *, here: bool, safe_serialization: bool) -> None:
    """Write one object with torch or safetensors, on the processes where `here` holds."""
    if not here:
        return
    if safe_serialization:
        state = clean_state_dict_for_safetensors(dict(obj))
        if hasattr(f, "write"):
            from safetensors.torch import save as to_bytes

            f.write(to_bytes(state, metadata={"format": "pt"}))
        else:
            files.write(Path(f), lambda path: _save(state, path, safe=True))
    elif hasattr(f, "write"):
        torch.save(obj, f)
    else:
        files.write(Path(f), lambda path: torch.save(obj, path))
