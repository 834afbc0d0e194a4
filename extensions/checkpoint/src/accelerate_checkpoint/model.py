"""Model weights in files that other programs can load: safetensors, in shards with an index."""

from __future__ import annotations

import json
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from accelerate_checkpoint import files
from accelerate_checkpoint.files import FileEntry
from accelerate_checkpoint.manifest import MARK
from accelerate_checkpoint.progress import byte_bar
from accelerate_checkpoint.quantized_weights import as_plain_tensors
from accelerate_checkpoint.weights import (
    checkpoint_files,
    clean_state_dict_for_safetensors,
    load_state_dict,
    shard_state_dict,
)
from accelerate_core.plugin import CheckpointError, canonical_key, match_keys

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

    All new files are complete before any old one is replaced, so weights may be read from files
    that this call replaces. Shards of an earlier save are removed.

    Args:
        safe_serialization: write safetensors instead of using `torch.save`.
        read: returns the weight of a name, for weights that are on the meta device. It is called
            when that weight is written, so they are never all in memory at once.
    """
    directory.mkdir(parents=True, exist_ok=True)
    whole = clean_state_dict_for_safetensors(state) if safe_serialization else dict(state)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=directory) as beside:
        size = sum(one.nbytes for one in whole.values() if isinstance(one, torch.Tensor))
        how = files.MODEL, max_shard_size, safe_serialization
        with byte_bar(f"Writing {directory.name}", size) as advance:
            made = write_weights(Path(beside), whole, *how, advance, read)
        publish(Path(beside), directory, made)


def publish(folder: Path, directory: Path, made: Collection[str]) -> None:
    """Move complete weight files from `folder` to `directory`, and remove those of an earlier save.

    If this is interrupted, readers find a whole model or none.
    """
    # Readers find the shards through the index. An older one could name shards of both models.
    for name in filter(is_index, made):
        if (directory / name).exists():
            (directory / name).unlink()
            files.sync_directory(directory)
    for name in sorted(made, key=is_index):
        os.replace(folder / name, directory / name)
    files.sync_directory(directory)
    for path in directory.iterdir():  # readers would mistake older shards for current ones
        if is_weights(path.name) and path.name not in made:
            path.unlink()


def is_index(name: str) -> bool:
    """Return whether a weight file is an index of shards."""
    return name.endswith(".json")


def is_weights(name: str) -> bool:
    """Return whether `save_weights` uses this file name."""
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
    """Write a state dict in one file or in shards, and return the files with their checksums.

    Args:
        state: weights by name. For safetensors, none of them may share memory.
        stem: start of the file names.
        max_shard_size: largest size of a file.
        safe: write safetensors instead of using `torch.save`.
        read: see `save_weights`.
    """
    suffix = ".safetensors" if safe else ".bin"
    name = stem if safe else stem.replace(files.MODEL, "pytorch_model", 1)
    shards: Mapping[str, Mapping[str, Any]] = {f"{name}{suffix}": state}
    index = None
    # The extra state of modules has no known size, so such state dicts are not sharded.
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
    """Read the files that `save_weights` wrote.

    Only one name of tied weights is stored. The other names in `into` get the same tensor.

    Args:
        stem: start of the file names.
        listed: the files that may be read. None allows all, for checkpoints without a manifest.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
    """
    return _fit(read_files(_files(directory, stem, listed), load_state_dict), into)


def weights_layout(
    directory: Path, stem: str, into: torch.nn.Module, listed: Container[str] | None = None
) -> dict[str, list[int]] | None:
    """Return names and shapes without reading the weights, or None if that is not possible."""
    paths = _files(directory, stem, listed)
    layout = _fit(read_files(paths, _shapes), into)
    for name, value in into.state_dict(keep_vars=True).items():
        if name not in layout and not isinstance(value, torch.Tensor):
            return None  # extra state, which safetensors cannot store
    return layout


def _shapes(path: Path) -> dict[str, list[int]]:
    if path.suffix != ".safetensors":
        held = load_state_dict(path)  # mapped, so that the weights are not read
        return {name: list(t.shape) for name, t in held.items() if isinstance(t, torch.Tensor)}
    with safe_open(path, framework="pt") as file:
        return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def read_files(paths: Iterable[Path], read: Callable[[Path], Mapping[str, T]]) -> dict[str, T]:
    """Return the merged results of `read` for all files.

    Raises:
        CheckpointError: a file cannot be read. The message names it.
    """
    found: dict[str, T] = {}
    for path in paths:
        try:
            found.update(read(path))
        except (SafetensorError, RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{path} cannot be read: {files.first_line(error)}") from error
    return found


#: The prefix that torch's parallel wrappers add to names. Accelerate saves the wrapped model's state dict.
_PREFIX = "module."


def _fit(found: dict[str, T], into: torch.nn.Module) -> dict[str, T]:
    """Give weights the names that they have in `into`, including each name of tied weights."""
    own = as_plain_tensors(into.state_dict(keep_vars=True))
    found = match_keys(found, own, into)
    # `_orig_mod.` may also come before `module.`, so look for the latter in the plain names.
    while found and not any(name in own for name in found):
        plain = {canonical_key(name): value for name, value in found.items()}
        if not all(name.startswith(_PREFIX) for name in plain):
            break
        found = match_keys(
            {n.removeprefix(_PREFIX): value for n, value in plain.items()}, own, into
        )
    places = {
        name: _place(tensor) for name, tensor in own.items() if isinstance(tensor, torch.Tensor)
    }
    kept = {place: name for name, place in places.items() if name in found}
    for name, place in places.items():
        if name not in found and place in kept:
            found[name] = found[kept[place]]
    return found


def _place(tensor: torch.Tensor) -> Any:
    """Return a key that tied tensors share: their memory, or the object if it has no address.

    DTensors and other wrappers, meta tensors and empty tensors have no address.
    """
    pointer = tensor.data_ptr()
    return (tensor.device, pointer, tensor.shape, tensor.stride()) if pointer else id(tensor)


def _files(directory: Path, stem: str, listed: Container[str] | None) -> list[Path]:
    """Return the weight files of one model. With a manifest, they must be listed in it."""
    index = stem.removeprefix(files.MODEL)
    for name in (f"{stem}.safetensors", f"pytorch_model{index}.bin"):
        for path in (directory / name, directory / f"{name}.index.json"):
            if path.exists() if listed is None else path.name in listed:
                found = checkpoint_files(path)
                for one in found:
                    if listed is not None and one.name not in listed:
                        raise CheckpointError(
                            f"{path} names {one.name}, which the manifest does not list."
                        )
                return found
    raise CheckpointError(f"The checkpoint {directory} has no {stem}.safetensors.")


def save_object(obj: Any, f: Any, safe_serialization: bool) -> None:
    """Write one object to a path or an open file.

    Args:
        safe_serialization: write safetensors instead of using `torch.save`.
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
