"""Weights for others to load: safetensors, in shards with an index."""

from __future__ import annotations

import json
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from accelerate_checkpoint import files
from accelerate_checkpoint.files import FileEntry
from accelerate_checkpoint.manifest import MARK
from accelerate_checkpoint.progress import byte_bar
from accelerate_checkpoint.weights import (
    checkpoint_files,
    clean_state_dict_for_safetensors,
    load_state_dict,
    shard_state_dict,
)
from accelerate_core.plugin import CheckpointError

T = TypeVar("T")


def save_weights(
    state: Mapping[str, Any],
    directory: Path,
    *,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    read: files.Read | None = None,
) -> None:
    """Write a state dict as `model.safetensors`, or in shards of at most `max_shard_size` bytes.

    All files are written beside their places before any is replaced, so weights may be read from
    those that they replace; shards of an earlier save are removed.

    Args:
        safe_serialization: write safetensors, else by `torch.save`.
        read: returns, by name, a weight that is on the meta device in `state`. It is called when
            the weight is written, so that not all are in memory at once.
    """
    directory.mkdir(parents=True, exist_ok=True)
    whole = clean_state_dict_for_safetensors(state) if safe_serialization else dict(state)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=directory) as beside:
        size = sum(one.nbytes for one in whole.values() if isinstance(one, torch.Tensor))
        how = files.MODEL, max_shard_size, safe_serialization
        with byte_bar(f"Writing {directory.name}", size) as advance:
            made = write_weights(Path(beside), whole, *how, advance, read)
        # The index comes last: it is what makes shards a model.
        for name in sorted(made, key=lambda name: name.endswith(".json")):
            os.replace(Path(beside, name), directory / name)
    files.sync_directory(directory)
    for path in directory.iterdir():  # those of an earlier save would load as if they were current
        if is_weights(path.name) and path.name not in made:
            path.unlink()


def is_weights(name: str) -> bool:
    """Return whether a file has a name that `save_weights` gives."""
    return _WEIGHTS.fullmatch(name) is not None


_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")


def write_weights(
    directory: Path,
    state: Mapping[str, Any],
    stem: str,
    max_shard_size: int | str,
    safe: bool,
    progress: files.Progress | None = None,
    read: files.Read | None = None,
) -> dict[str, FileEntry]:
    """Write a state dict as `model.safetensors`, or in shards of at most `max_shard_size` bytes.

    For safetensors it has been cleaned of aliases. Returns the files with their checksums.

    Args:
        read: as in `save_weights`.
    """
    suffix = ".safetensors" if safe else ".bin"
    name = stem if safe else stem.replace(files.MODEL, "pytorch_model", 1)
    shards: Mapping[str, Mapping[str, Any]] = {f"{name}{suffix}": state}
    index = None
    # Extra state of modules cannot be measured.
    if all(isinstance(value, torch.Tensor) for value in state.values()):
        shards, index = shard_state_dict(state, max_shard_size, f"{name}{{suffix}}{suffix}")
    made = {}
    for filename, shard in shards.items():
        if safe:
            mark = {"format": "pt", MARK: "1"}
            path = directory / filename
            made[filename] = files.write_safetensors(path, shard, mark, progress, read)
        else:
            made[filename] = files.write_torch(
                directory / filename,
                {key: files.with_data(key, value, read) for key, value in shard.items()},
                progress,
            )
    if index is not None:
        filename = f"{name}{suffix}.index.json"
        text = json.dumps(index, indent=2, sort_keys=True)
        made[filename] = files.write_text(directory / filename, text)
    return made


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
    return _fit(read_files(_files(directory, stem, listed), load_state_dict), into)


def weights_layout(
    directory: Path, stem: str, into: torch.nn.Module, listed: Container[str] | None = None
) -> dict[str, list[int]] | None:
    """Return names and shapes without reading the weights, None if they are no safetensors."""
    paths = _files(directory, stem, listed)
    if any(path.suffix != ".safetensors" for path in paths):
        return None
    layout = _fit(read_files(paths, _shapes), into)
    for name, value in into.state_dict(keep_vars=True).items():
        if name not in layout and not isinstance(value, torch.Tensor):
            return None  # extra state, which safetensors cannot hold
    return layout


def _shapes(path: Path) -> dict[str, list[int]]:
    with safe_open(path, framework="pt") as file:
        return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def read_files(paths: Iterable[Path], read: Callable[[Path], Mapping[str, T]]) -> dict[str, T]:
    """Return what `read` finds in all files together.

    Raises:
        CheckpointError: one of them cannot be read, by name.
    """
    found: dict[str, T] = {}
    for path in paths:
        try:
            found.update(read(path))
        except (SafetensorError, RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{path} cannot be read: {files.first_line(error)}") from error
    return found


#: What wrappers put before the names; Accelerate keeps the wrapped model's state dict.
_PREFIXES = ("module.", "_orig_mod.")


def _fit(found: dict[str, T], into: torch.nn.Module) -> dict[str, T]:
    """Take wrappers' prefixes off the names, and give tied ones what was kept under another name."""
    own = into.state_dict(keep_vars=True)
    while found and not any(name in own for name in found):
        prefix = next((p for p in _PREFIXES if all(n.startswith(p) for n in found)), None)
        if prefix is None:
            break
        found = {name.removeprefix(prefix): value for name, value in found.items()}
    places = {
        name: _place(tensor) for name, tensor in own.items() if isinstance(tensor, torch.Tensor)
    }
    kept = {place: name for name, place in places.items() if name in found}
    for name, place in places.items():
        if name not in found and place in kept:
            found[name] = found[kept[place]]
    return found


def _place(tensor: torch.Tensor) -> Any:
    """Return what tied tensors have in common: their memory; the object, where it has no address.

    Such are DTensor and other wrappers, what is on meta, and what is empty.
    """
    pointer = tensor.data_ptr()
    return (tensor.device, pointer, tensor.shape, tensor.stride()) if pointer else id(tensor)


def _files(directory: Path, stem: str, listed: Container[str] | None) -> list[Path]:
    """Return the files of one model's weights; with a manifest, only such as it vouches for."""
    index = stem.removeprefix(files.MODEL)
    for name in (f"{stem}.safetensors", f"pytorch_model{index}.bin"):
        for path in (directory / name, directory / f"{name}.index.json"):
            if path.exists() if listed is None else path.name in listed:
                found = checkpoint_files(path)
                for one in found:
                    if listed is not None and one.name not in listed:
                        raise CheckpointError(
                            f"{path} names {one.name}, which the manifest does not."
                        )
                return found
    raise CheckpointError(f"The checkpoint {directory} has no {stem}.safetensors.")


def save_object(obj: Any, f: Any, safe_serialization: bool) -> None:
    """Write one object with torch or safetensors: to a path, or into an open file.

    Args:
        safe_serialization: write safetensors, else by `torch.save`.
    """
    state = clean_state_dict_for_safetensors(dict(obj)) if safe_serialization else obj
    if not hasattr(f, "write"):
        files.write_beside(
            Path(f),
            lambda path: (
                files.write_safetensors(path, state, {"format": "pt"})
                if safe_serialization
                else files.write_torch(path, state)
            ),
        )
    elif safe_serialization:
        from safetensors.torch import save as to_bytes

        f.write(to_bytes(state, metadata={"format": "pt"}))
    else:
        torch.save(state, f)
