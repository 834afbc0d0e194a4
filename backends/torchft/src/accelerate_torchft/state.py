"""The state that a replica sends to one that joins: everything in a checkpoint, kept in memory.

Each rank sends its own part to the rank with the same number in the other replica, so shards are sent as
they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from accelerate_checkpoint import TrainingState
from accelerate_core.plugin import RunParts

#: Key in a rank's state for everything that Accelerate doesn't save.
_OWN = "accelerate_core"


@dataclass
class Shard:
    """This rank's part of a distributed tensor."""

    local: torch.Tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds. It shares the tensor's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def capture(run: RunParts) -> dict[str, Any]:
    """Copy the state of a run between two steps."""
    state = TrainingState(run)
    state.update_scale()
    with torch.no_grad():
        rank = state.rank_state()
        rank[_OWN]["trackers"] = {}  # each replica has runs of its own
        return {
            "models": [_copied(state.inner(model).state_dict()) for model in run.models],
            "optimizers": [_copied(one.state_dict()) for one in state.optimizers],
            "schedulers": [_copied(one.state_dict()) for one in run.schedulers],
            "registered": [_copied(one.state_dict()) for one in run.registered],
            "scaler": None if run.scaler is None else run.scaler.state_dict(),
            "rank": rank,
        }


def restore(run: RunParts, captured: Mapping[str, Any]) -> None:
    """Load a captured state into the prepared objects, and the positions of the loaders."""
    state = TrainingState(run)
    with torch.no_grad():
        for model, its in zip(run.models, captured["models"], strict=True):
            _load_model(state.inner(model), its)
    for optimizer, its in zip(state.optimizers, captured["optimizers"], strict=True):
        _load_optimizer(optimizer, its)
    for scheduler, its in zip(run.schedulers, captured["schedulers"], strict=True):
        scheduler.load_state_dict(its)
    for registered, its in zip(run.registered, captured["registered"], strict=False):
        registered.load_state_dict(its)
    if run.scaler is not None:
        run.scaler.load_state_dict(captured["scaler"])
    rank = run.process.process_index
    states = {0: captured["rank"], rank: captured["rank"]}
    state.load_rank_state(states, run.process.num_processes, ())


def _copied(tree: Any) -> Any:
    def copy(leaf: Any) -> Any:
        if isinstance(leaf, DTensor):
            return Shard(leaf.to_local().detach().clone())
        return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(copy, tree)


def _load_model(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    live = model.state_dict()
    rest = {}
    for name, value in state.items():
        if isinstance(value, Shard):
            value = value.local
        if isinstance(value, torch.Tensor) and isinstance(live.get(name), torch.Tensor):
            local(live[name]).copy_(value)
        else:
            rest[name] = value  # extra state of a module
    if rest:
        model.load_state_dict(rest, strict=False)


def _load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    parameters = list(_parameters(optimizer))

    def whole(value: Any, parameter: torch.Tensor) -> Any:
        if not isinstance(value, Shard):
            return value
        assert isinstance(parameter, DTensor), "the replicas shard alike"
        return DTensor.from_local(
            value.local.to(parameter.device),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    its = {
        index: {name: whole(value, parameters[index]) for name, value in values.items()}
        for index, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": its})


def _parameters(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
