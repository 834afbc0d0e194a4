"""Sharded checkpoints, written with torch.distributed.checkpoint (DCP), and whole state dicts.

DCP only receives tensors, because it would pickle anything else. Other values of an optimizer are
written to a JSON file next to it. DCP's own metadata is also a pickle, and is read through an
allow-list.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelerate_checkpoint import (
    FileEntry,
    Staging,
    as_plain_tensors,
    load_shards_into,
    read_metadata,
    restore_quantized,
    run_together,
    save_sharded,
    shard_name_matcher,
    with_names,
    writes_shard,
)
from accelerate_core.plugin import (
    AcceleratorView,
    CheckpointError,
    ParallelismConfig,
    listing,
    parse_json,
    plain_keys,
    read_limited,
)
from accelerate_fsdp2.gradients import local
from accelerate_fsdp2.weights import cut, local_part, whole

_PLAIN = "optimizers.json"
#: Its most bytes. It has the name of each parameter twice.
_LARGEST_PLAIN = 64 << 20


class Sharded:
    """Writes and reads the shards of all models and optimizers of a run."""

    def __init__(self) -> None:
        self._group: Any = None
        #: Host memory that the copies of background saves reuse.
        self._staging = Staging()

    def save(
        self,
        models: list[nn.Module],
        plain_states: list[dict[str, Any]],
        optimizers: list[Any],
        directory: Path,
        later: bool,
    ) -> Callable[[], dict[str, FileEntry]]:
        """Return a function that writes the states into `directory`.

        It returns the checksums of the files that this rank wrote.

        Args:
            plain_states: the state dicts of the models, as plain tensors that share their memory.
            later: whether training continues before the function is called, so the tensors are copied now.
        """
        tensors = _model_tensors(plain_states)
        states = _optimizer_states(models, optimizers)
        plain = [state.take_apart(tensors) for state in states]
        if dist.get_rank() == 0:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / _PLAIN).write_text(json.dumps(plain))
        dist.barrier()
        if not later:
            return lambda: save_sharded(tensors, directory)
        if self._group is None:  # a separate group, because writing runs parallel to training
            self._group = dist.new_group(backend="gloo")
        rank = dist.get_rank()
        mine = {n: t.detach() for n, t in tensors.items() if writes_shard(n, t, rank)}
        self._staging.begin()
        held = self._staging.copy({name: local(tensor) for name, tensor in mine.items()})
        copies = {name: _like(tensor, held[name]) for name, tensor in mine.items()}
        return lambda: save_sharded(copies, directory, self._group)

    def release(self) -> None:
        """Free the host memory of the copies. No background save may be running."""
        self._staging.release()

    def load(
        self,
        models: list[nn.Module],
        plain_states: list[dict[str, Any]],
        optimizers: list[Any],
        directory: Path,
        strict: bool,
    ) -> None:
        """Read a checkpoint, written by any number of ranks, into the models and optimizers.

        Raises:
            CheckpointError: names, shapes or dtypes do not match, in which case nothing was
                changed; or a file cannot be read. Raised on every rank.
        """
        read = partial(_read, models, plain_states, optimizers, directory, strict)
        put = run_together(read)
        put()


def _read(
    models: list[nn.Module],
    plain_states: list[dict[str, Any]],
    optimizers: list[Any],
    directory: Path,
    strict: bool,
) -> Callable[[], None]:
    """Check a checkpoint and read it into the models. Return a function that restores the rest.

    Each rank reads its parts and plans for itself, because DCP would collect all plans on rank 0.
    """
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory.parent} is not a sharded checkpoint of FSDP2. Load it with "
            "FullyShardedDataParallelPlugin(state_dict_type='FULL_STATE_DICT')."
        )
    tensors = _model_tensors(plain_states)
    states = _optimizer_states(models, optimizers)
    match = shard_name_matcher([*tensors, *(name for state in states for name in state.full_names)])
    metadata = with_names(read_metadata(directory), match)
    stored = metadata.state_dict_metadata
    _compare(directory, tensors, stored, strict)
    tensors = {name: tensor for name, tensor in tensors.items() if name in stored}
    plain = _read_plain(directory / _PLAIN, len(states))
    buffers = []
    for state in states:
        state.rename(plain[state.number], match)
        buffers.append(state.allocate(stored, directory))
        state.compare(plain[state.number], directory)
        tensors |= buffers[-1]
    load_shards_into(tensors, directory, metadata)

    def put() -> None:
        for model, state_dict in zip(models, plain_states, strict=True):
            restore_quantized(model, state_dict)  # settings that are not a tensor of the model
        for state, values in zip(states, buffers, strict=True):
            state.put(values, plain[state.number])

    return put


def _read_plain(path: Path, optimizers: int) -> list[Any]:
    """Return what `take_apart` returned for each optimizer."""
    try:
        plain: Any = parse_json(read_limited(path, _LARGEST_PLAIN))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    states = plain if isinstance(plain, list) else []
    if len(states) < optimizers or not all(map(_is_plain_state, states)):
        raise CheckpointError(
            f"{path} is damaged: it must list 'class', 'groups' and 'values' of {optimizers} optimizers."
        )
    return states


def _is_plain_state(state: Any) -> bool:
    return (
        isinstance(state, dict)
        and isinstance(state.get("class"), str)
        and isinstance(state.get("values"), dict)
        and all(isinstance(values, dict) for values in state["values"].values())
        and isinstance(state.get("groups"), list)
        and all(isinstance(group, dict) and _has_names(group) for group in state["groups"])
    )


def _has_names(group: dict[str, Any]) -> bool:
    names = group.get("params")
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _like(tensor: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Return `held` as a DTensor with the layout of `tensor`, if that is a DTensor."""
    if not isinstance(tensor, DTensor):
        return held
    shape = tensor.shape
    stride = tensor.stride()
    return DTensor.from_local(
        held, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride
    )


def _model_tensors(states: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {
        f"model.{number}.{name}": value.detach()
        for number, state in enumerate(states)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def _optimizer_states(models: list[nn.Module], optimizers: list[Any]) -> list[_OptimizerState]:
    """Name each optimizer's parameters by the number of the model and their name in it."""
    names = {
        id(parameter): f"{number}.{name}"
        for number, model in enumerate(models)
        for name, parameter in reversed(list(_named_parameters(model).items()))
    }
    return [_OptimizerState(*numbered, names) for numbered in enumerate(optimizers)]


def _named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return plain_keys(model, dict(model.named_parameters(remove_duplicate=False)))


class _OptimizerState:
    """The state of one optimizer: tensors, sharded like its parameters, and plain data."""

    def __init__(self, number: int, optimizer: Any, names: Mapping[int, str]) -> None:
        self.number = number
        self.optimizer = optimizer
        self._kind = type(optimizer).__name__
        self._prefix = f"optimizer.{number}."
        for parameter in _parameters(optimizer):
            if id(parameter) not in names:
                raise CheckpointError(
                    f"An optimizer has a parameter of shape {tuple(parameter.shape)} that is in no "
                    "prepared model. It cannot be saved, because it has no name. Prepare its model."
                )
        #: The name of each parameter, and the names in each group.
        self._names = {parameter: names[id(parameter)] for parameter in _parameters(optimizer)}
        self._groups = [[names[id(p)] for p in g["params"]] for g in optimizer.param_groups]

    @property
    def full_names(self) -> list[str]:
        """The names of the parameters in the checkpoint, to which the keys of their state are added."""
        return [self._prefix + name for name in self._names.values()]

    def rename(self, plain: Any, match: Callable[[str], str]) -> None:
        """Replace the names in the plain data by those of this run."""

        def matched(name: str) -> str:
            return match(self._prefix + name).removeprefix(self._prefix)

        for group in plain["groups"]:
            group["params"] = [matched(name) for name in group["params"]]
        plain["values"] = {matched(name): values for name, values in plain["values"].items()}

    def take_apart(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Add the state's tensors to `tensors`, and return the rest as plain data."""
        values: dict[str, dict[str, Any]] = {}
        for parameter, state in self.optimizer.state.items():
            if parameter not in self._names:
                raise self._unsupported(f"the state {parameter!r}")
            name = self._names[parameter]
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{self._prefix}{name}.{key}"] = value.detach()
                elif _is_plain(value):
                    values.setdefault(name, {})[key] = value
                else:
                    raise self._unsupported(f"{key!r} of {name}")
        groups = [
            {**{key: _plain(value) for key, value in group.items()}, "params": names}
            for group, names in zip(self.optimizer.param_groups, self._groups, strict=True)
        ]
        return {"groups": groups, "values": values, "class": self._kind}

    def _unsupported(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._kind} has {what} in its state, which a sharded checkpoint cannot store: it "
            "only supports tensors and plain values of each parameter. Use "
            "FullyShardedDataParallelPlugin(state_dict_type='FULL_STATE_DICT')."
        )

    def compare(self, plain: Any, directory: Path) -> None:
        """Check that the same class of optimizer, with the same groups, saved the state."""
        there = [list(group["params"]) for group in plain["groups"]]
        if self._groups != there:
            raise CheckpointError(
                f"{directory}: the parameter groups of optimizer {self.number} do not match the "
                f"checkpoint. Numbers of parameters per group: {[len(g) for g in there]} in the "
                f"checkpoint, {[len(g) for g in self._groups]} in this run."
            )
        if plain["class"] != self._kind:
            raise CheckpointError(
                f"{directory}: optimizer {self.number} is {plain['class']} in the checkpoint, but "
                f"{self._kind} in this run."
            )

    def allocate(self, stored: Mapping[str, Any], directory: Path) -> dict[str, torch.Tensor]:
        """Return tensors into which the state is read: those of the optimizer, or new ones."""
        made: dict[str, torch.Tensor] = {}
        by_name = {self._prefix + name: parameter for parameter, name in self._names.items()}
        for name, entry in stored.items():
            of, _, key = name.rpartition(".")
            parameter = by_name.get(of)
            if parameter is None:
                continue
            if not isinstance(entry, TensorStorageMetadata):
                raise CheckpointError(f"{directory}: {name} is not a tensor.")
            dtype = entry.properties.dtype
            there = self.optimizer.state.get(parameter, {}).get(key)
            sharded = entry.size == parameter.shape and parameter.dim() > 0
            if _fits(there, entry, sharded and isinstance(parameter, DTensor)):
                made[name] = there.detach()  # without a second copy of the state in memory
            elif sharded:
                made[name] = torch.zeros_like(parameter, dtype=dtype)
            else:
                made[name] = torch.zeros(entry.size, dtype=dtype)
        return made

    def put(self, tensors: dict[str, torch.Tensor], plain: Any) -> None:
        """Load the tensors and plain data into the optimizer."""
        read: dict[str, dict[str, Any]] = {}
        for full, value in tensors.items():
            name, _, key = full.removeprefix(self._prefix).rpartition(".")
            read.setdefault(name, {})[key] = value
        self.optimizer.state.clear()
        for parameter, name in self._names.items():
            if found := {**read.get(name, {}), **plain["values"].get(name, {})}:
                self.optimizer.state[parameter] = found
        for group, there in zip(self.optimizer.param_groups, plain["groups"], strict=True):
            for key, value in there.items():
                was = group.get(key)
                if key == "params" or (value is None and was is not None):
                    continue
                if isinstance(was, torch.Tensor):
                    was.fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(was, tuple) else value


def _fits(there: Any, entry: TensorStorageMetadata, sharded: bool) -> bool:
    """Return whether a stored tensor can be read into the one that an optimizer has."""
    return (
        isinstance(there, torch.Tensor)
        and isinstance(there, DTensor) == sharded
        and there.shape == entry.size
        and there.dtype == entry.properties.dtype
        and not there.is_meta
    )


def _parameters(optimizer: Any) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()  # such as a learning rate for a compiled step
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
        if entry is None:
            wrong += [f"{name} is missing in the checkpoint"] if strict else []
        elif not isinstance(entry, TensorStorageMetadata):
            wrong.append(f"{name} is not a tensor in the checkpoint")
        elif entry.size != tensor.shape:
            wrong.append(
                f"{name} has shape {list(entry.size)} in the checkpoint and "
                f"{list(tensor.shape)} in this run"
            )
        elif entry.properties.dtype != tensor.dtype:
            wrong.append(
                f"{name} is {entry.properties.dtype} in the checkpoint and {tensor.dtype} in this run"
            )
    if strict:
        wrong += [
            f"{name} is in the checkpoint but in no model"
            for name in stored
            if name.startswith("model.") and name not in tensors
        ]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"The checkpoint {directory} does not match this run: {'; '.join(wrong[:3])}{more}."
        )


# --- whole state dicts ------------------------------------------------------------------------------


def full_model(shards: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole state dict in host memory on rank 0, and an empty one on other ranks.

    Each rank gathers one parameter at a time.
    """
    state: dict[str, Any] = {}
    first = dist.get_rank() == 0
    for name, value in shards.items():
        made = whole(value) if isinstance(value, torch.Tensor) else value
        quantized = is_traceable_wrapper_subclass(made)  # and whole on each rank
        if first and quantized:
            made = made.clone().cpu()
        elif first and made is not value:
            # With one rank, `made` is the shard itself, which training changes.
            made = made.to("cpu", copy=made.data_ptr() == local(value).data_ptr())
        if first:
            state[name] = made
    return state


def load_full_model(
    own: Mapping[str, Any],
    state: Mapping[str, Any],
    config: ParallelismConfig,
    strict: bool,
    kind: str,
) -> None:
    """Copy this rank's shards from a whole state dict into a model's state dict.

    Args:
        own: the state dict of the model.
        kind: class of the model, for the error message.
    """
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own]
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"The weights do not match {kind}: "
            f"missing {listing(missing[:3])}; not in the model {listing(unexpected[:3])}."
        )
    rank = dist.get_rank()
    with torch.no_grad():
        for name, value in own.items():
            if name in state and isinstance(value, torch.Tensor):
                if isinstance(value, DTensor):
                    value.to_local().copy_(local_part(state[name], value, config, rank))
                else:
                    value.copy_(state[name])


def full_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's whole state dict on rank 0, and an empty one on other ranks."""
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
    """Load this rank's shards of a whole optimizer state."""
    rank = dist.get_rank()
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    own: dict[Any, dict[str, Any]] = {}
    for number, parameter in zip(numbers, _parameters(optimizer), strict=True):
        if values := dict(state["state"].get(number, {})):
            shard_state(parameter, values, config, rank)
            own[number] = values
    optimizer.load_state_dict({"state": own, "param_groups": list(state["param_groups"])})


def shard_state(
    parameter: torch.Tensor, values: dict[str, Any], config: ParallelismConfig, rank: int
) -> None:
    """Shard an optimizer's state for a parameter like the parameter itself, in place."""
    if isinstance(parameter, DTensor) and parameter.dim():
        for key, value in values.items():
            is_whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            if is_whole and value.shape == parameter.shape:
                values[key] = cut(value, parameter, config, rank)


def plain_state(accelerator: AcceleratorView, model: nn.Module) -> dict[str, Any]:
    """Return a model's shards as plain tensors, without a precision's subclass, sharing memory."""
    inner = accelerator.unwrap_model(model)
    plain = accelerator.precision.plain_state(inner, inner.state_dict())
    return plain_keys(inner, plain)


def unwrapped(
    accelerator: AcceleratorView,
) -> tuple[list[nn.Module], list[dict[str, Any]], list[Any]]:
    """Return the models and optimizers of the script, and the models' states as plain shards."""
    models = [accelerator.unwrap_model(model) for model in accelerator.models]
    plain = [as_plain_tensors(plain_state(accelerator, model)) for model in accelerator.models]
    return models, plain, [wrapper.optimizer for wrapper in accelerator.optimizers]
