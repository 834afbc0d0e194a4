"""Keep weights on disk, in the files of a checkpoint or each in its own file, with an index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate_big_model.mapped import PlainFile, SafetensorsFile, TorchFile, stamp
from accelerate_big_model.tensors import (
    Device,
    covered,
    set_module_tensor_to_device,
    torch_dtype,
)
from accelerate_checkpoint import as_device
from accelerate_core.plugin import (
    CheckpointError,
    ConfigurationError,
    did_you_mean,
    is_count,
    parse_json,
    read_limited,
)

INDEX_NAME = "index.json"
#: Bytes of an index.
_LARGEST_INDEX = 64 << 20
#: The class that opens the file, for each key under which an index entry may name one.
MAPPED: dict[str, Any] = {"safetensors_file": SafetensorsFile, "torch_file": TorchFile}
Index = dict[str, dict[str, Any]]


def mapped_key(path: Path) -> str:
    """Return the key of `MAPPED` under which an index entry names a checkpoint file."""
    return "safetensors_file" if path.suffix == ".safetensors" else "torch_file"


def offload_weight(
    weight: torch.Tensor,
    weight_name: str,
    offload_folder: str | Path,
    index: Index | None = None,
) -> Index:
    """Write one tensor to `<weight_name>.dat` in a folder, and add it to the index.

    Args:
        weight: any dense tensor.
        weight_name: its name in the model.
        offload_folder: the folder, which is created if necessary.
        index: the index so far, which is changed and returned.
    """
    index = {} if index is None else index
    folder = Path(offload_folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Always create a new file, because the old one may still be mapped.
    (folder / f"{weight_name}.dat").unlink(missing_ok=True)
    flat = weight.detach().to("cpu").reshape(-1)
    (folder / f"{weight_name}.dat").write_bytes(
        flat.view(torch.uint8).numpy().data if flat.numel() else b""
    )
    dtype = str(weight.dtype).removeprefix("torch.")
    index[weight_name] = {"dtype": dtype, "shape": list(weight.shape)}
    return index


def load_offloaded_weight(weight_file: str | Path, weight_info: Mapping[str, Any]) -> torch.Tensor:
    """Return one tensor, mapped from its file, so that bytes are read only when they are used.

    Writing to it does not change the file.

    Args:
        weight_file: the `.dat` file.
        weight_info: the tensor's `dtype` and `shape`, as in the index.

    Raises:
        CheckpointError: the file is missing, or too short for the dtype and shape.
    """
    return PlainFile(Path(weight_file), weight_info).read()


def save_offload_index(index: Index, offload_folder: str | Path) -> None:
    """Merge an index into the `index.json` of a folder.

    Args:
        index: the entries to add or replace.
        offload_folder: the folder of the weights.
    """
    folder = Path(offload_folder)
    folder.mkdir(parents=True, exist_ok=True)
    merged = {**load_offload_index(folder, missing_ok=True), **index}
    (folder / INDEX_NAME).write_text(json.dumps(merged), encoding="utf-8")


def load_offload_index(offload_folder: str | Path, missing_ok: bool = False) -> Index:
    """Read the index of a folder. With `missing_ok`, a missing index is empty.

    Raises:
        CheckpointError: the index is missing or damaged.
    """
    path = Path(offload_folder) / INDEX_NAME
    if missing_ok and not path.is_file():
        return {}
    try:
        index: Index = parse_json(read_limited(path, _LARGEST_INDEX))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"Cannot read the index of offloaded weights {path}: {error}"
        ) from error
    if not isinstance(index, dict):
        raise CheckpointError(f"The index of offloaded weights {path} is not a JSON object.")
    for name, entry in index.items():
        _check_entry(f"The entry {name!r} of {path}", entry)
    return index


def _check_entry(subject: str, entry: object) -> None:
    if not isinstance(entry, dict):
        raise CheckpointError(f"{subject} is not a JSON object.")
    for key in (*MAPPED, "file", "weight_name", "dtype"):
        value = entry.get(key)
        if value is not None and not (isinstance(value, str) and value.isprintable()):
            raise CheckpointError(f"{subject} has {key}={value!r:.80}, which is not a name.")
    shape = entry.get("shape")
    if any(entry.get(key) is not None for key in MAPPED):
        return
    if not isinstance(shape, list) or not all(is_count(size, 1 << 48) for size in shape):
        raise CheckpointError(f"{subject} has shape={shape!r:.80}, which is not a list of sizes.")
    if not isinstance(getattr(torch, str(entry.get("dtype")), None), torch.dtype):
        raise CheckpointError(
            f"{subject} has dtype={entry.get('dtype')!r:.80}, which torch has not."
        )


def offload_state_dict(save_dir: str | Path, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write a state dict and its index to a folder, tensor by tensor.

    Args:
        save_dir: the folder, which is created if necessary.
        state_dict: the tensors by name.
    """
    index: Index = {}
    for name, weight in state_dict.items():
        offload_weight(weight, name, save_dir, index)
    save_offload_index(index, save_dir)


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Mapping[str, Any]], offload_folder: str | Path
) -> None:
    """Load offloaded weights back into a model, on the CPU.

    Args:
        model: the model.
        index: the index entries by name.
        offload_folder: the folder of the weights.
    """
    weights = OffloadedWeightsLoader(save_folder=offload_folder, index=index)
    for name in index:
        set_module_tensor_to_device(model, name, "cpu", value=weights[name])


class PrefixedDataset(Mapping[str, torch.Tensor]):
    """The weights of one module, as a view of the model's weights that adds a prefix to each key.

    Args:
        dataset: the tensors by full name.
        prefix: the prefix of the module's names.
    """

    def __init__(self, dataset: Mapping[str, torch.Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        for key in self.dataset:
            if key.startswith(self.prefix):
                yield key.removeprefix(self.prefix)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def whole_map(weights: Any, name: str) -> tuple[Any, str]:
    """Return the weights of the whole model, and the full name of a module's weight in them."""
    while isinstance(weights, PrefixedDataset):
        weights, name = weights.dataset, f"{weights.prefix}{name}"
    return weights, name


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Weights by name, some of them in memory and the others mapped from disk when they are read.

    Args:
        state_dict: the weights in memory.
        save_folder: the folder of the weights on disk.
        index: the index of the weights on disk; by default the folder's `index.json`. An entry has
            either `dtype` and `shape`, or `safetensors_file` or `torch_file` with `weight_name` and
            optionally `dtype`.
        device: the device for weights from disk; by default the CPU.

    Raises:
        ConfigurationError: none of the first three arguments is given, or an entry needs a folder.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: str | Path | None = None,
        index: Mapping[str, Mapping[str, Any]] | None = None,
        device: Device | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ConfigurationError("Pass a state_dict, a save_folder or an index.")
        self.state_dict = dict(state_dict or {})
        self.save_folder = None if save_folder is None else Path(save_folder).resolve()
        if index is None:
            index = load_offload_index(self.save_folder) if self.save_folder else {}
        self.index: Index = index if isinstance(index, dict) else dict(index)  # type: ignore[arg-type]
        self.device = torch.device("cpu") if device is None else as_device(device)
        self._files: dict[Path, Any] = {}
        self._found: dict[str, tuple[Any, str]] = {}
        self.all_keys = [*self.state_dict, *(key for key in index if key not in self.state_dict)]

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        if key not in self.index:
            raise KeyError(f"No offloaded weight {key!r}.{did_you_mean(key, self.all_keys)}")
        file, name = self._file(key)
        if not self.is_unchanged(key):
            raise CheckpointError(
                f"{file.path} has changed since {key!r} was first loaded from it. Load the model again."
            )
        found: torch.Tensor = file.read(name)
        dtype = self.index[key].get("dtype")
        return found.to(self.device, found.dtype if dtype is None else torch_dtype(dtype))

    def _file(self, key: str) -> tuple[Any, str]:
        """Return the file of a weight, as it was when first used, and the weight's name in it."""
        if key in self._found:
            return self._found[key]
        info = self.index[key]
        kind = next((one for one in MAPPED if info.get(one) is not None), None)
        if kind is None and self.save_folder is None:
            raise ConfigurationError(f"The offloaded weight {key!r} needs a save_folder.")
        # A tied weight's entry names the file of the weight that it is tied to.
        plain = str(info.get("file", f"{key}.dat"))
        path = Path(info[kind]) if kind else Path(self.save_folder or "", plain)
        if path not in self._files:
            self._files[path] = MAPPED[kind](path) if kind else PlainFile(path, info)
        self._found[key] = self._files[path], str(info.get("weight_name", key))
        return self._found[key]

    def about(self, key: str) -> torch.Tensor:
        """Return a tensor with a weight's shape and dtype, on the meta device."""
        file, name = self._file(key)
        found = file.peek(name)
        dtype = self.index[key].get("dtype")
        wanted = found.dtype if dtype is None else torch_dtype(dtype)
        return torch.empty(found.shape, dtype=wanted, device="meta")

    def is_unchanged(self, key: str) -> bool:
        """Return whether a weight's file is unchanged since it was first used."""
        file, _ = self._file(key)
        try:
            return bool(file.stamp == stamp(file.path))
        except OSError:
            return False

    def relocate(self, key: str, kind: str, path: Path, name: str) -> None:
        """Read a weight from another file from now on.

        Args:
            key: the weight's name here.
            kind: `safetensors_file` or `torch_file`.
            path: the file, which must contain the same values.
            name: the weight's name in that file.
        """
        file, _ = self._found.pop(key)
        self._files.pop(file.path, None)
        kept = {about: value for about, value in self.index[key].items() if about not in MAPPED}
        self.index[key] = {**kept, kind: str(path), "weight_name": name}

    def is_cached(self, key: str) -> bool | None:
        """Return whether the page cache has a weight, None if `fetch` is not supported."""
        file, name = self._file(key)
        return file.is_cached(name) if isinstance(file, SafetensorsFile) else None

    def fetch(self, key: str) -> None:
        """Read a weight into the page cache, in huge pages, because these are mapped faster.

        Raises:
            OSError: the disk failed, or the file has been truncated.
        """
        file, name = self._file(key)
        file.fetch(name)

    def on_disk(self, key: str) -> bool:
        """Return whether a weight comes from a file."""
        return key in self.index and key not in self.state_dict

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles only keep the file names, and map the files when they need them.
        return {**self.__dict__, "_files": {}, "_found": {}}

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Return the entries that belong to the named modules.

    Args:
        state_dict: the state dict of the whole model.
        submodule_names: full names of modules; `""` is the whole model.
    """
    names = set(submodule_names)
    return {name: value for name, value in state_dict.items() if covered(name, names)}
