"""Read state dicts from files, remove aliases from them, and split them into shards."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from accelerate_core.plugin import (
    CheckpointError,
    ConfigurationError,
    did_you_mean,
    parse_json,
    read_limited,
)

#: The usual file names of weights, in the order in which they are looked for.
_USUAL = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

#: Bytes of an index. Models with hundreds of experts have more than a hundred thousand weights.
_LARGEST_INDEX = 64 << 20

_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([KMGT]?)(I?)([Bb]?)\s*", re.IGNORECASE)
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def convert_file_size_to_int(size: float | str) -> int:
    """Return the number of bytes in a size such as `"5MB"`, `"1.5GiB"` or `"200"`.

    `KB`, `MB` … are powers of 1000, `KiB`, `MiB` … powers of 1024. A lowercase `b` after the unit
    means bits.

    Raises:
        ConfigurationError: the string is not a size.
    """
    if isinstance(size, (int, float)):
        return int(size)
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ConfigurationError(
            f"{size!r} is not a size. Write a number and a unit, such as '5MB', '2GiB' or '512'."
        )
    number, unit, binary, last = match.groups()
    count = float(number) * (1024 if binary else 1000) ** _POWER[unit.upper()]
    return int(count / 8 if last == "b" and unit else count)


def as_device(device: int | str | torch.device) -> torch.device:
    """Return the device for an accelerator's index, a name or a device.

    Raises:
        ConfigurationError: `device` is an index, but torch finds no accelerator.
    """
    if not isinstance(device, int):
        return torch.device(device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        raise ConfigurationError(
            f"Device {device} is the index of an accelerator, but torch finds none on this machine."
            " Use 'cpu' or 'disk'."
        )
    return torch.device(accelerator.type, device)


def device_of(name: str, device_map: Mapping[str, Any]) -> Any:
    """Return the device for a name: that of the longest prefix in the device map.

    Raises:
        ConfigurationError: no entry covers the name.
    """
    prefix = name
    while prefix and prefix not in device_map:
        prefix = prefix.rpartition(".")[0]
    if prefix not in device_map:
        raise ConfigurationError(
            f"The device map has no device for {name!r}.{did_you_mean(name, device_map)}"
        )
    return device_map[prefix]


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return device, address and size of the storage, which are equal for tensors that share it.

    Meta tensors have no address, so their `id` is used instead.
    """
    if tensor.device.type == "meta":
        return tensor.device, id(tensor), tensor.nbytes
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def iter_state_dict(checkpoint_file: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and CPU tensors of a weight file, with about one tensor in memory at a time.

    Raises:
        CheckpointError: the file contains something other than a state dict.
    """
    path = Path(checkpoint_file)
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - the handle is not a mapping
                yield name, file.get_tensor(name)
        return
    # torch can only map zip files. Files from before torch 1.6 have another format.
    mapped = zipfile.is_zipfile(path)
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    # Some trainers store the weights under one key next to other values.
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} contains a {type(state).__name__}, not a state dict.")
    inner = state.get("state_dict")
    weights = inner if isinstance(inner, Mapping) else state
    yield from weights.items()


def load_state_dict(
    checkpoint_file: str | Path, device_map: Mapping[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """Read one weight file without running code from it.

    Args:
        checkpoint_file: a `.safetensors` file, or a file that `torch.save` wrote.
        device_map: each tensor is moved to the device of the entry that covers its name. Tensors
            for `"disk"` stay on the CPU. Without a map, all tensors do.
    """
    tensors = iter_state_dict(checkpoint_file)
    if device_map is None:
        return dict(tensors)
    state = {}
    for name, tensor in tensors:
        device = device_of(name, device_map)
        state[name] = tensor if str(device) == "disk" else tensor.to(as_device(device))
    return state


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return a state dict whose tensors share no memory, as safetensors requires.

    If several names have the same tensor, only the first name is kept. Views of a part of a
    storage are copied. Values that are not tensors are dropped.
    """
    clean: dict[str, torch.Tensor] = {}
    seen: dict[tuple[torch.device, int, int], list[tuple[Any, ...]]] = {}
    for name, tensor in state_dict.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        tensor = tensor.detach()
        if not tensor.numel():
            clean[name] = tensor.contiguous()
            continue
        extent = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        extents = seen.setdefault(id_tensor_storage(tensor), [])
        if extent in extents:
            continue
        if extents or tensor.nbytes != tensor.untyped_storage().nbytes():
            clean[name] = tensor.clone(memory_format=torch.contiguous_format)
        else:
            clean[name] = tensor.contiguous()
        extents.append(extent)
    return clean


def shard_state_dict(
    state: Mapping[str, torch.Tensor],
    max_shard_size: int | str = "10GB",
    pattern: str = "model{suffix}.safetensors",
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any] | None]:
    """Split a state dict into files of limited size, in the order of its names.

    Args:
        state: tensors by name, none of which may share memory.
        max_shard_size: bytes, or a string such as `"5GB"`. A larger tensor gets its own file.
        pattern: the file name. `{suffix}` is replaced by `-00001-of-00003`.

    Returns:
        The tensors of each file by file name, and the content of the index file
        (`metadata.total_size` and `weight_map`), or None if there is only one file.

    Raises:
        ConfigurationError: `max_shard_size` is not positive.
    """
    limit = convert_file_size_to_int(max_shard_size)
    if limit <= 0:
        raise ConfigurationError(
            f"max_shard_size={max_shard_size!r} is not valid: it must be positive."
        )
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in state.items():
        if shards[-1] and filled + tensor.nbytes > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    if len(shards) == 1:
        return {pattern.format(suffix=""): shards[0]}, None
    files = {
        pattern.format(suffix=f"-{number:05d}-of-{len(shards):05d}"): shard
        for number, shard in enumerate(shards, start=1)
    }
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in state.values())},
        "weight_map": {name: file for file, shard in files.items() for name in shard},
    }
    return files, index


def checkpoint_files(checkpoint: str | Path) -> list[Path]:
    """Return the weight files of a checkpoint: a file, an index, or a folder with one of these.

    In a folder, safetensors take precedence over `.bin`, a single file over an index, and the
    usual names over any other index.

    Raises:
        CheckpointError: there are no weights, several candidates, or a file is missing.
    """
    path = Path(checkpoint)
    if path.is_file():
        return _files_of_index(path) if path.name.endswith(".json") else [path]
    if not path.is_dir():
        raise CheckpointError(f"There is no checkpoint {path}.")
    for name in _USUAL:
        if (path / name).is_file():
            return checkpoint_files(path / name)
    found = sorted(path.glob("*.index.json")) or sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        held = f"several: {', '.join(f.name for f in found)}" if found else "none"
        raise CheckpointError(
            f"The folder {path} must contain one checkpoint ({_USUAL[0]}, {_USUAL[2]} or"
            f" an index of shards), but contains {held}."
        )
    return checkpoint_files(found[0])


def _files_of_index(index: Path) -> list[Path]:
    try:
        content = parse_json(read_limited(index, _LARGEST_INDEX))
        names = sorted(set(content.get("weight_map", content).values()))
        if not all(isinstance(name, str) and name.isprintable() for name in names):
            raise TypeError("the values of 'weight_map' must be file names")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is not an index of shards: {error}") from error
    files = [index.parent / name for name in names]
    for name, file in zip(names, files):
        # Names must not lead outside the folder. Links may, as in caches of the Hugging Face Hub.
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{index} names {file}, which is outside its folder.")
        if not file.is_file():
            raise CheckpointError(f"{index} names {file.name}, which does not exist next to it.")
    return files
