"""Model states in host memory, and sharded checkpoints."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from accelerate_checkpoint import (
    TensorShard,
    TensorShardReader,
    TensorShardWriter,
    load_shards_into,
    read_metadata,
    shard_name_matcher,
    with_names,
)
from accelerate_core.plugin import AcceleratorView, CheckpointError, parse_json, read_limited
from accelerate_xla.library import imported

_PLAIN = "plain.json"
#: Its most bytes. It has a few numbers for each parameter.
_LARGEST_PLAIN = 64 << 20


def on_host(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy tensors to the host. A tensor with two names is copied once, so it stays tied.

    On XLA, all storages have the address 0. Code that compares addresses would find all weights tied.
    """
    made: dict[int, torch.Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            made[id(value)] = value.detach().cpu()
        return made[id(value)]

    return {name: copy(value) for name, value in state.items()}


# --- in shards ----------------------------------------------------------------------------------


def save(accelerator: AcceleratorView, directory: Path, later: bool) -> Callable[[], None] | None:
    """Write each shard on this process's devices once.

    Returns:
        None, or with `later`, a function that writes the copied shards.
    """
    shards: list[TensorShard] = []
    plain = []
    for number, model in enumerate(accelerator.models):
        state = accelerator.unwrap_model(model).state_dict(keep_vars=True)
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                shards += _shards(f"model.{number}.{name}", value)
    for number, wrapper in enumerate(accelerator.optimizers):
        state = wrapper.optimizer.state_dict()
        for index, key, value in _values(state):
            if value.ndim:
                shards += _shards(_key(number, index, key), value)
        plain.append(_plain(type(wrapper.optimizer).__name__, state))
    write = partial(_write, accelerator, shards, plain, directory)
    if later and accelerator.num_processes == 1:
        return write
    write()
    return None


def _write(
    accelerator: AcceleratorView, shards: list[TensorShard], plain: Any, directory: Path
) -> None:
    alone = accelerator.num_processes == 1
    if accelerator.is_main_process:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / _PLAIN).write_text(json.dumps(plain))
    if not alone:
        accelerator.wait_for_everyone()
    writer = dcp.FileSystemWriter(directory, sync_files=True, overwrite=False)
    with _quiet():
        dcp.save({}, storage_writer=writer, planner=TensorShardWriter(shards), no_dist=alone)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide torch's warning about a single process, and deprecation warnings inside libraries."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        warnings.filterwarnings("ignore", "Using a non-tuple sequence")
        yield


def _shards(key: str, tensor: torch.Tensor) -> Iterator[TensorShard]:
    value = tensor.detach()
    size = tuple(tensor.shape)
    if value.device.type == "xla":
        value = imported("distributed.spmd").wrap_if_sharded(tensor.data)
    if not hasattr(value, "local_shards"):
        yield TensorShard(key=key, tensor=value.cpu(), size=size, offset=(0,) * len(size))
        return
    with _quiet():
        shards = [(one, one.unpadded_data) for one in value.local_shards]
    for shard, held in shards:
        if shard.replica_id == 0 and shard.indices is not Ellipsis:
            offset = tuple(int(one.start) for one in shard.indices)
            yield TensorShard(key=key, tensor=held, size=size, offset=offset)
        elif shard.replica_id == 0 or shard.indices is Ellipsis:
            yield TensorShard(key=key, tensor=shard.data, size=size, offset=(0,) * len(size))
            return


def _key(number: int, index: int, key: str) -> str:
    return f"optimizer.{number}.{index}.{key}"


def _values(state: Mapping[str, Any]) -> Iterator[tuple[int, str, Any]]:
    for index, values in state["state"].items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor | int | float):
                yield index, key, torch.as_tensor(value)
            elif value is not None:
                raise CheckpointError(
                    f"The optimizer's state has {key!r}, a {type(value).__name__}. Sharded checkpoints "
                    "only support numbers and tensors. Use state_dict_type='FULL_STATE_DICT'."
                )


def _plain(kind: str, state: Mapping[str, Any]) -> dict[str, Any]:
    numbers: dict[int, dict[str, float]] = {}
    for index, key, value in _values(state):
        if not value.ndim:
            numbers.setdefault(index, {})[key] = value.item()
    groups = [{key: _json(value) for key, value in one.items()} for one in state["param_groups"]]
    return {"class": kind, "param_groups": groups, "numbers": numbers}


def _json(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def load(
    accelerator: AcceleratorView, directory: Path, *, optimizers: bool = True, strict: bool = True
) -> None:
    """Read a sharded checkpoint. It may have been written with a different mesh.

    Raises:
        CheckpointError: the checkpoint does not match the models and optimizers, which are then
            unchanged; or a file cannot be read.
    """
    names = {
        f"model.{number}.{name}"
        for number, model in enumerate(accelerator.models)
        for name in accelerator.unwrap_model(model).state_dict()
    }
    metadata = with_names(read_metadata(directory), shard_name_matcher(names))
    stored = metadata.state_dict_metadata
    try:
        plain = parse_json(read_limited(directory / _PLAIN, _LARGEST_PLAIN))
        if not isinstance(plain, list) or not all(map(_is_plain_state, plain)):
            raise ValueError("it must list 'class', 'param_groups' and 'numbers' of each optimizer")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory / _PLAIN} cannot be read: {error}") from error
    _compare(accelerator, directory, stored, plain if optimizers else None, strict)
    read = {
        key: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
        and (optimizers or not key.startswith("optimizer."))
    }
    shards = [
        TensorShard(key=key, tensor=one, size=tuple(one.shape), offset=(0,) * one.ndim)
        for key, one in read.items()
    ]
    alone = accelerator.num_processes == 1
    planner = TensorShardReader(shards, stored)
    with _quiet():
        load_shards_into({}, directory, metadata, planner=planner, no_dist=alone)
    for number, model in enumerate(accelerator.models):
        prefix = f"model.{number}."
        state = {
            key.removeprefix(prefix): one for key, one in read.items() if key.startswith(prefix)
        }
        accelerator.hooks.load_model_state(model, state, strict)
    for number, wrapper in enumerate(accelerator.optimizers if optimizers else ()):
        state = _optimizer_state(number, plain[number], read, wrapper.optimizer)
        accelerator.hooks.load_optimizer_state(wrapper.optimizer, state)


def _is_plain_state(state: Any) -> bool:
    """Return whether an entry has the form of what `_plain` returns."""
    if not isinstance(state, dict) or not isinstance(state.get("class"), str):
        return False
    groups, numbers = state.get("param_groups"), state.get("numbers")
    return (
        isinstance(groups, list)
        and all(isinstance(group, dict) for group in groups)
        and isinstance(numbers, dict)
        and all(index.isdecimal() and isinstance(of, dict) for index, of in numbers.items())
        and all(isinstance(one, int | float) for of in numbers.values() for one in of.values())
    )


def _compare(
    accelerator: AcceleratorView, directory: Path, stored: Any, plain: Any, strict: bool
) -> None:
    wrong = []
    known = set()
    for number, model in enumerate(accelerator.models):
        for name, value in accelerator.unwrap_model(model).state_dict().items():
            key = f"model.{number}.{name}"
            known.add(key)
            entry = stored.get(key)
            if not isinstance(entry, TensorStorageMetadata):
                wrong += [f"{key} is missing in the checkpoint"] if strict else []
            elif entry.size != value.shape:
                wrong.append(
                    f"{key} has shape {list(entry.size)} in the checkpoint and "
                    f"{list(value.shape)} in this run"
                )
    lost = [key for key in stored if key.startswith("model.") and key not in known]
    wrong += [f"{key} is in the checkpoint but in no model" for key in lost] if strict else []
    if plain is not None:
        kinds = [type(wrapper.optimizer).__name__ for wrapper in accelerator.optimizers]
        there = [one["class"] for one in plain]
        if kinds != there:
            wrong.append(f"it has the optimizers {there}, but this run has {kinds}")
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"The checkpoint {directory} does not match this run: {'; '.join(wrong[:3])}{more}."
        )


def _optimizer_state(number: int, plain: Any, read: Mapping[str, Any], here: Any) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    for index, values in plain["numbers"].items():
        state[int(index)] = {key: torch.tensor(value) for key, value in values.items()}
    prefix = f"optimizer.{number}."
    for key, value in read.items():
        if key.startswith(prefix):
            index, name = key.removeprefix(prefix).split(".", 1)
            state.setdefault(int(index), {})[name] = value
    groups = []
    for saved, own in zip(plain["param_groups"], here.param_groups, strict=False):
        tuples = {key for key, value in own.items() if isinstance(value, tuple)}
        groups.append({k: tuple(v) if k in tuples else v for k, v in saved.items()})
    return {"state": state, "param_groups": groups or plain["param_groups"]}
