"""Sharded checkpoints: torch.distributed.checkpoint inside the core's atomic directory.

Each rank writes what it holds as shards of whole tensors, so any layout can read what another one
wrote. Megatron's own writer is not used because it pickles, and starts a process that runs the main
script again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from accelerate_checkpoint import (
    TensorShard,
    TensorShardReader,
    TensorShardWriter,
    load_shards_into,
    read_metadata,
    run_together,
)
from accelerate_core.plugin import CheckpointError, parse_json, read_limited
from accelerate_megatron.engine import Engine
from accelerate_megatron.shards import Part

_PLAIN = "plain.json"
#: Its most bytes. It has the name of each parameter.
_LARGEST_PLAIN = 64 << 20


@dataclass(frozen=True, eq=False, kw_only=True)
class _PartShard(TensorShard):
    """A range of a tensor in memory, and the shard of a stored tensor to which it corresponds."""

    part: Part


def save(engines: list[Engine], directory: Path, *, optimizers: bool) -> None:
    """Write the models and optimizers of all ranks to `directory`."""
    found = [shard for number, engine in enumerate(engines) for shard in _model(number, engine)]
    plain: list[Any] = []
    if optimizers:
        for number, engine in enumerate(engines):
            found += _optimizer(number, engine)
            plain.append(_plain(engine))
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        sizes = [engine.vocab_size for engine in engines]
        (directory / _PLAIN).write_text(json.dumps({"vocab_sizes": sizes, "optimizers": plain}))
    dist.barrier()
    writer = dcp.FileSystemWriter(directory, sync_files=True, overwrite=False)
    dcp.save({}, storage_writer=writer, planner=TensorShardWriter(found))


def load(engines: list[Engine], directory: Path, *, optimizers: bool, strict: bool) -> None:
    """Read a checkpoint, regardless of the layout that wrote it.

    Raises:
        CheckpointError: something is missing or does not match, and nothing has been changed; or a
            file cannot be read.
    """
    metadata, vocab_sizes, plain = run_together(partial(_read_small_files, directory))
    stored = metadata.state_dict_metadata
    shards = [shard for number, engine in enumerate(engines) for shard in _model(number, engine)]
    _compare(directory, shards, stored, strict)
    # Each layout pads embeddings differently, so their shapes say nothing.
    for number, (there, engine) in enumerate(zip(vocab_sizes, engines, strict=False)):
        if there != engine.vocab_size:
            raise CheckpointError(
                f"The checkpoint {directory} has a vocabulary of {there} tokens for model {number}, "
                f"but in this run the vocabulary has {engine.vocab_size} tokens."
            )
    shards = [shard for shard in shards if shard.key in stored]
    if not optimizers:
        plain = []
    else:
        if len(plain) != len(engines):
            said = "without optimizers" if not plain else f"with {len(plain)} models"
            raise CheckpointError(
                f"{directory} was saved {said}, but this run has {len(engines)} models. To load "
                "only the models, call load_state(load_optimizer=False)."
            )
        for engine, there in zip(engines, plain, strict=True):
            _check_groups(engine, there, directory)
    read: list[dict[torch.Tensor, dict[str, torch.Tensor]]] = []
    for number, engine in enumerate(engines if optimizers else []):
        names = plain[number]["keys"] if plain[number] else []
        read.append(_allocate(engine, names))
        shards += _optimizer(number, engine, read[-1], names)
    planner = TensorShardReader(shards, stored)
    load_shards_into({}, directory, metadata, planner=planner, no_dist=False)
    for engine, there, states in zip(engines, plain, read, strict=False):
        _put(engine, there, states)
    for engine in engines:
        if engine.optimizer is not None and not optimizers:
            engine.optimizer.reload_model_params()


# --- what is saved ------------------------------------------------------------------------------


def _model(number: int, engine: Engine) -> Iterator[_PartShard]:
    for parameter, parts in engine.parts.items():
        for part in parts:
            flat = parameter.detach().reshape(-1)
            yield _shard(f"model.{number}.", part, flat, 0, main=not any(part.replica))


def _shard(prefix: str, part: Part, flat: torch.Tensor, first: int, *, main: bool) -> _PartShard:
    size = 1
    for length in part.shape:
        size *= length
    run = flat[part.start - first : part.start - first + size]
    return _PartShard(
        key=prefix + part.key,
        tensor=run.view(part.shape),
        size=part.size,
        offset=part.offset,
        main=main,
        part=part,
    )


def _optimizer(
    number: int,
    engine: Engine,
    states: dict[torch.Tensor, dict[str, torch.Tensor]] | None = None,
    names: list[str] | None = None,
) -> Iterator[_PartShard]:
    """Yield what the optimizer keeps for each parameter: its fp32 copy and its state.

    Args:
        states: use these instead of the optimizer's own.
    """
    if engine.optimizer is None:
        return
    for parameter, held, first, end in engine.held():
        kept = _kept(engine, parameter, held) if states is None else states[held]
        split = end - first < parameter.numel() or engine.distributed
        for part in engine.parts[parameter]:
            replica = part.replica[:-1] if split else part.replica
            for shard in part.within(first, end):
                for name, value in kept.items():
                    prefix = f"optimizer.{number}.{name}."
                    flat = value.detach().reshape(-1)
                    yield _shard(prefix, shard, flat, first, main=not any(replica))


def _kept(engine: Engine, parameter: Any, held: torch.Tensor) -> dict[str, torch.Tensor]:
    state = engine.inner.state.get(held, {}) if engine.inner is not None else {}
    kept = {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.shape == held.shape
    }
    # In fp32, a shard of the distributed optimizer is a view of the parameter.
    if held is not parameter and held.dtype != parameter.dtype:
        kept["param"] = held
    return kept


def _plain(engine: Engine) -> Any:
    """Return what is not a tensor of a parameter's shape; it is the same on every rank."""
    if engine.inner is None:
        return None
    steps: dict[str, float] = {}
    keys: set[str] = set()
    for parameter, held, _, _ in engine.held():
        kept = _kept(engine, parameter, held)
        keys |= kept.keys()
        for name, value in engine.inner.state.get(held, {}).items():
            if name in kept:
                continue
            if not isinstance(value, int | float) and getattr(value, "numel", lambda: 0)() != 1:
                raise CheckpointError(
                    f"{type(engine.inner).__name__} keeps {name!r} for {engine.name(parameter)}, which "
                    "is neither a number nor a tensor of the parameter's shape. The megatron backend "
                    "cannot save it. Use AdamW or SGD, or another backend."
                )
            steps[name] = float(value)
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, (steps, sorted(keys)))
    steps = {name: value for there, _ in everything for name, value in there.items()}
    groups = [
        {key: _value(value) for key, value in group.items() if key != "params"} | {"params": names}
        for group, names in zip(engine.inner.param_groups, engine.group_names, strict=True)
    ]
    scaler = getattr(engine.optimizer, "grad_scaler", None)
    return {
        "class": type(engine.inner).__name__,
        "groups": groups,
        "values": steps,
        "keys": sorted({key for _, names in everything for key in names}),
        "scaler": None if scaler is None else _scaler_state(scaler),
    }


def _value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _scaler_state(scaler: Any) -> dict[str, Any]:
    return {name: _value(value) for name, value in scaler.state_dict().items()}


# --- reading ------------------------------------------------------------------------------------


def _read_small_files(directory: Path) -> tuple[Metadata, list[Any], list[Any]]:
    """Return the metadata, the size of the vocabulary of each model, and the optimizers' plain values."""
    metadata = read_metadata(directory)
    try:
        plain = parse_json(read_limited(directory / _PLAIN, _LARGEST_PLAIN))
        optimizers = list(plain["optimizers"])
        if not all(state is None or _is_plain_state(state) for state in optimizers):
            raise ValueError("'optimizers' has an entry of another form")
        return metadata, list(plain["vocab_sizes"]), optimizers
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory / _PLAIN} cannot be read: {error}") from error


def _is_plain_state(state: Any) -> bool:
    """Return whether an entry has the form of what `_plain` returns."""
    if not isinstance(state, dict) or not state.keys() >= {
        "class",
        "groups",
        "values",
        "keys",
        "scaler",
    }:
        return False
    groups, values, scaler = state["groups"], state["values"], state["scaler"]
    return (
        isinstance(groups, list)
        and all(isinstance(group, dict) and _are_names(group.get("params")) for group in groups)
        and isinstance(values, dict)
        and all(isinstance(value, int | float) for value in values.values())
        and _are_names(state["keys"])
        and (scaler is None or (isinstance(scaler, dict) and "scale" in scaler))
    )


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _compare(directory: Path, shards: list[_PartShard], stored: Any, strict: bool) -> None:
    wrong = []
    for shard in shards:
        entry = stored.get(shard.key)
        if not isinstance(entry, TensorStorageMetadata):
            wrong += [f"{shard.key} is missing in the checkpoint"] if strict else []
        elif tuple(entry.size) != shard.part.size and not shard.part.padded:
            wrong.append(
                f"{shard.key} has shape {list(entry.size)} in the checkpoint and "
                f"{list(shard.part.size)} in this run"
            )
    keys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(keys, {shard.key for shard in shards})
    known = set().union(*keys)
    lost = [key for key in stored if key.startswith("model.") and key not in known]
    wrong += [f"{key} is in the checkpoint but in no model" for key in lost] if strict else []
    run_together(partial(_refuse, directory, wrong))


def _refuse(directory: Path, wrong: list[str]) -> None:
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"The checkpoint {directory} does not match this run: {'; '.join(wrong[:3])}{more}."
        )


def _check_groups(engine: Engine, there: Any, directory: Path) -> None:
    if (there is None) != (engine.inner is None):
        raise CheckpointError(
            f"The checkpoint {directory} was saved {'without' if there is None else 'with'} an "
            f"optimizer, but this run has {'one' if there is None else 'none'}."
        )
    if there is None or engine.inner is None:
        return
    kind = type(engine.inner).__name__
    if there["class"] != kind:
        raise CheckpointError(
            f"The checkpoint {directory} has a {there['class']}, but the optimizer of this run is a "
            f"{kind}."
        )
    # The order depends on the layout.
    groups = [sorted(group["params"]) for group in there["groups"]]
    if groups != [sorted(names) for names in engine.group_names]:
        raise CheckpointError(
            f"The optimizer's groups contain other parameters than in the checkpoint {directory}: "
            f"{[len(g) for g in engine.group_names]} parameters in this run, "
            f"{[len(g) for g in groups]} in the checkpoint. Create the optimizer with the saved groups."
        )


def _allocate(engine: Engine, names: list[str]) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    if engine.optimizer is None:
        return {}
    return {
        held: {
            name: torch.zeros_like(held, dtype=torch.float32)
            for name in names
            if name != "param" or held.dtype != parameter.dtype
        }
        for parameter, held, _, _ in engine.held()
    }


def _put(engine: Engine, there: Any, states: dict[torch.Tensor, dict[str, torch.Tensor]]) -> None:
    """Load what was read into the optimizer."""
    inner, optimizer = engine.inner, engine.optimizer
    if inner is None:
        return
    if "param" not in there["keys"]:  # saved in fp32: the copies are made from the parameters
        optimizer.reload_model_params()
    inner.state.clear()
    for held, kept in states.items():
        if "param" in kept:
            held.data.copy_(kept.pop("param"))
        if kept or there["values"]:
            numbers = {name: torch.tensor(value) for name, value in there["values"].items()}
            inner.state[held] = {**numbers, **kept}
    for group, saved in zip(inner.param_groups, there["groups"], strict=True):
        for key, value in saved.items():
            was = group.get(key)
            if key != "params":
                group[key] = tuple(value) if isinstance(was, tuple) else value
    scaler = getattr(optimizer, "grad_scaler", None)
    if scaler is not None and there["scaler"] is not None:
        saved = dict(there["scaler"])
        saved["scale"] = torch.tensor([saved["scale"]], device=scaler.scale.device)
        scaler.load_state_dict(saved)
