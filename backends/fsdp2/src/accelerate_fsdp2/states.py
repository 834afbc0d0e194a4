"""Sharded checkpoints: torch.distributed.checkpoint inside the core's atomic directory.

Tensors only are given to it: what else an optimizer has goes into a file of plain data beside, as
torch would pickle it. Its own metadata is a pickle, too, and is read through an allow-list.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from accelerate_checkpoint import SafeReader, read_metadata
from accelerate_core import ParallelismConfig
from accelerate_core.errors import CheckpointError, listing
from accelerate_fsdp2.weights import local_part, whole

__all__ = [
    "Sharded",
    "full_model",
    "full_optimizer",
    "load_full_model",
    "load_full_optimizer",
    "parameter_names",
]

_PLAIN = "optimizers.json"


def parameter_names(models: list[nn.Module]) -> dict[int, str]:
    """Return the name of every parameter by its id, with the number of its model before it."""
    return {
        id(parameter): f"{number}.{name}"
        for number, model in enumerate(models)
        for name, parameter in reversed(list(model.named_parameters(remove_duplicate=False)))
    }


class Sharded:
    """Writes and reads the shards of all models and optimizers of a run."""

    def __init__(self) -> None:
        self._group: Any = None

    def save(
        self, models: list[nn.Module], optimizers: list[Any], directory: Path, later: bool
    ) -> Callable[[], None] | None:
        """Write into `directory`; with `later` copy now and return what writes the copy."""
        tensors = _model_tensors(models)
        plain = []
        for number, optimizer in enumerate(optimizers):
            own, rest = _optimizer_parts(optimizer, parameter_names(models), f"optimizer.{number}")
            tensors |= own
            plain.append(rest)
        if dist.get_rank() > 0:  # what is whole on every rank is rank 0's
            tensors = {n: tensor for n, tensor in tensors.items() if isinstance(tensor, DTensor)}
        if dist.get_rank() == 0:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / _PLAIN).write_text(json.dumps(plain))
        dist.barrier()
        if not later:
            dcp.save(tensors, storage_writer=_writer(directory))
            return None
        if self._group is None:  # transfers beside the training have a group of their own
            self._group = dist.new_group(backend="gloo")
        copies = {name: _copied(tensor) for name, tensor in tensors.items()}
        group = self._group
        return lambda: dcp.save(copies, storage_writer=_writer(directory), process_group=group)

    def load(
        self, models: list[nn.Module], optimizers: list[Any], directory: Path, strict: bool
    ) -> None:
        """Read what any number of ranks wrote into the parameters and states of this run.

        Raises:
            CheckpointError: names, shapes or dtypes do not fit. Nothing has been changed then.
        """
        if not directory.is_dir():
            raise CheckpointError(
                f"{directory.parent} was not saved in shards by FSDP2. Load it with "
                "FullyShardedDataParallelPlugin(state_dict_type='FULL_STATE_DICT')."
            )
        metadata = read_metadata(directory)
        stored = metadata.state_dict_metadata
        tensors = _model_tensors(models)
        _compare(directory, tensors, stored, strict)
        tensors = {name: tensor for name, tensor in tensors.items() if name in stored}
        names = parameter_names(models)
        try:
            plain = json.loads((directory / _PLAIN).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{directory / _PLAIN} cannot be read: {error}") from error
        states = []
        for number, optimizer in enumerate(optimizers):
            prefix = f"optimizer.{number}"
            own = _empty_state(optimizer, names, prefix, stored, directory)
            _compare_groups(directory, number, plain[number], optimizer, names)
            tensors |= own
            states.append((optimizer, prefix, own, plain[number]))
        try:
            dcp.load(tensors, storage_reader=SafeReader(directory, metadata))
        except Exception as error:
            raise CheckpointError(f"{directory} cannot be read: {error}") from error
        for optimizer, prefix, own, rest in states:
            _put_state(optimizer, names, prefix, own, rest)


def _writer(directory: Path) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(directory, sync_files=True, overwrite=False)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return DTensor.from_local(
            tensor.to_local().detach().to("cpu", copy=True),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return tensor.detach().to("cpu", copy=True)


def _model_tensors(models: list[nn.Module]) -> dict[str, torch.Tensor]:
    return {
        f"model.{number}.{name}": value.detach()
        for number, model in enumerate(models)
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def _parameters(optimizer: Any) -> list[tuple[int, nn.Parameter]]:
    return [
        (number, parameter)
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    ]


def _name(names: Mapping[int, str], parameter: nn.Parameter) -> str:
    if id(parameter) not in names:
        raise CheckpointError(
            f"An optimizer holds a parameter of the shape {tuple(parameter.shape)} that is in no "
            "prepared model, and has no name under which it could be saved."
        )
    return names[id(parameter)]


def _optimizer_parts(
    optimizer: Any, names: Mapping[int, str], prefix: str
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of an optimizer's state by name, and the rest as plain data."""
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = [
        {"params": [], **{k: _plain(v) for k, v in group.items() if k != "params"}}
        for group in optimizer.param_groups
    ]
    known = {parameter for _, parameter in _parameters(optimizer)}
    if strange := [key for key in optimizer.state if key not in known]:
        raise CheckpointError(_cannot_hold(optimizer, f"the state {strange[0]!r}"))
    for number, parameter in _parameters(optimizer):
        name = _name(names, parameter)
        groups[number]["params"].append(name)
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{prefix}.{name}.{key}"] = value.detach()
            elif _is_plain(value):
                values.setdefault(name, {})[key] = value
            else:
                raise CheckpointError(_cannot_hold(optimizer, f"{key!r} of {name}"))
    return tensors, {"groups": groups, "values": values, "class": type(optimizer).__name__}


def _cannot_hold(optimizer: Any, what: str) -> str:
    return (
        f"A sharded checkpoint holds tensors and plain values of each parameter, and "
        f"{type(optimizer).__name__} keeps {what}, which is neither. Use "
        "FullyShardedDataParallelPlugin(state_dict_type='FULL_STATE_DICT')."
    )


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()  # a hyperparameter that changes in a compiled step
    return value if _is_plain(value) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return isinstance(value, bool | int | float | str | None)


def _compare(
    directory: Path, tensors: Mapping[str, Any], stored: Mapping[str, Any], strict: bool
) -> None:
    wrong = []
    for name, tensor in tensors.items():
        entry = stored.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            wrong += [f"{name} is missing there"] if strict else []
        elif entry.size != tensor.shape:
            wrong.append(f"{name} has shape {list(entry.size)} there and {list(tensor.shape)} here")
        elif entry.properties.dtype != tensor.dtype:
            wrong.append(f"{name} is {entry.properties.dtype} there and {tensor.dtype} here")
    if strict:
        wrong += [
            f"{name} is in no model"
            for name in stored
            if name.startswith("model.") and name not in tensors
        ]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise CheckpointError(f"{directory} does not fit: {'; '.join(wrong[:3])}{more}.")


def _compare_groups(
    directory: Path, number: int, rest: Any, optimizer: Any, names: Mapping[int, str]
) -> None:
    own = [[_name(names, p) for p in group["params"]] for group in optimizer.param_groups]
    there = [list(group["params"]) for group in rest["groups"]]
    if own != there:
        raise CheckpointError(
            f"{directory}: the groups of optimizer {number} hold other parameters than when it was "
            f"saved: {[len(g) for g in there]} there, {[len(g) for g in own]} here."
        )
    if rest["class"] != type(optimizer).__name__:
        raise CheckpointError(
            f"{directory}: optimizer {number} was a {rest['class']} when it was saved, and is a "
            f"{type(optimizer).__name__}."
        )


def _empty_state(
    optimizer: Any,
    names: Mapping[int, str],
    prefix: str,
    stored: Mapping[str, Any],
    directory: Path,
) -> dict[str, torch.Tensor]:
    """Return tensors to read an optimizer's state into: sharded as its parameters are."""
    made: dict[str, torch.Tensor] = {}
    by_name: dict[str, list[str]] = {}
    for name in stored:
        if name.startswith(prefix + "."):
            by_name.setdefault(name.rpartition(".")[0], []).append(name)
    for _, parameter in _parameters(optimizer):
        for name in by_name.get(f"{prefix}.{_name(names, parameter)}", ()):
            entry = stored[name]
            if not isinstance(entry, TensorStorageMetadata):
                raise CheckpointError(f"{directory}: {name} is no tensor.")
            dtype = entry.properties.dtype
            if entry.size == parameter.shape and parameter.dim():
                made[name] = torch.zeros_like(parameter, dtype=dtype)
            else:
                made[name] = torch.zeros(entry.size, dtype=dtype)
    return made


def _put_state(
    optimizer: Any, names: Mapping[int, str], prefix: str, own: dict[str, Any], rest: Any
) -> None:
    state: dict[Any, dict[str, Any]] = {}
    read: dict[str, dict[str, Any]] = {}
    for full, value in own.items():
        name, _, key = full.rpartition(".")
        read.setdefault(name, {})[key] = value
    for _, parameter in _parameters(optimizer):
        name = _name(names, parameter)
        found = {**read.get(f"{prefix}.{name}", {}), **rest["values"].get(name, {})}
        if found:
            state[parameter] = found
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, there in zip(optimizer.param_groups, rest["groups"], strict=True):
        for key, value in there.items():
            was = group.get(key)
            if key == "params" or (value is None and was is not None):
                continue
            if isinstance(was, torch.Tensor):
                was.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(was, tuple) else value


# --- whole state dicts, as of one process -----------------------------------------------------------


def full_model(model: nn.Module) -> dict[str, Any]:
    """Return the whole state dict on rank 0, in host memory, and an empty one elsewhere.

    A rank holds one whole parameter at a time.
    """
    state: dict[str, Any] = {}
    first = dist.get_rank() == 0
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            if first:
                state[name] = value
            continue
        held = value.to_local() if isinstance(value, DTensor) else value
        made = whole(value)
        if first:
            # On one rank the whole is the shard itself, which training changes.
            state[name] = made.to("cpu", copy=made.data_ptr() == held.data_ptr())
    return state


def load_full_model(
    model: nn.Module, state: Mapping[str, Any], config: ParallelismConfig, strict: bool
) -> None:
    """Copy each rank's parts out of a whole state dict."""
    own = model.state_dict()
    missing = [name for name in own if name not in state]
    strange = [name for name in state if name not in own]
    if strict and (missing or strange):
        raise CheckpointError(
            f"The weights do not fit {type(model).__name__}: "
            f"missing {listing(missing[:3])}; not in the model {listing(strange[:3])}."
        )
    rank = dist.get_rank()
    with torch.no_grad():
        for name, value in own.items():
            if name in state and isinstance(value, torch.Tensor):
                _fill(value, state[name], config, rank)


def _fill(value: torch.Tensor, source: torch.Tensor, config: ParallelismConfig, rank: int) -> None:
    if isinstance(value, DTensor):
        value.to_local().copy_(local_part(source, value, config, rank))
    else:
        value.copy_(source)


def full_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's whole state dict on rank 0, in torch's form; an empty one elsewhere."""
    first = dist.get_rank() == 0
    packed = optimizer.state_dict()
    state: dict[Any, dict[str, Any]] = {}
    for number, values in packed["state"].items():
        made = {
            key: whole(value).to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
            for key, value in values.items()
        }
        if first:
            state[number] = made
    return {"state": state, "param_groups": packed["param_groups"]} if first else {}


def load_full_optimizer(
    optimizer: Any, state: Mapping[str, Any], config: ParallelismConfig
) -> None:
    """Cut a whole optimizer state to this rank's parts, and load it."""
    rank = dist.get_rank()
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for _, parameter in _parameters(optimizer)]
    cut: dict[Any, dict[str, Any]] = {}
    for number, parameter in zip(numbers, parameters, strict=True):
        values = dict(state["state"].get(number, {}))
        for key, value in values.items():
            same = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if same and isinstance(parameter, DTensor) and parameter.dim():
                room = torch.zeros_like(parameter, dtype=value.dtype)
                cast(Any, room).to_local().copy_(local_part(value, parameter, config, rank))
                values[key] = room
        if values:
            cut[number] = values
    optimizer.load_state_dict({"state": cut, "param_groups": list(state["param_groups"])})
