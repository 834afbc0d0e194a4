"""Save and load gradients in the middle of an accumulation cycle.

FSDP2 keeps gradients in up to three places: reduced, in the `grad` of a sharded parameter;
unreduced and whole on each rank, after a backward under `no_sync`; and, if shards are replicated,
reduced over shards but not yet over replicas. The key of each saved tensor says which it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from accelerate_core.plugin import CheckpointError, key_matcher
from accelerate_fsdp2.gradients import local, unreduced

_SHARDED = "sharded"
_WHOLE = "whole"
_PARTIAL = "partial"
_PLACEMENTS = "placements"
#: Numbers that represent placements. A non-negative number is the dimension of a shard.
_REPLICATED, _SUMMED = -1, -2
_WAY_OUT = "Load it with the mesh that saved it, or load a checkpoint that was saved after an optimizer step."


def read(
    model: nn.Module, groups: Sequence[Any], parameters: Collection[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return this rank's gradients of `parameters`, without a collective or a copy.

    Raises:
        CheckpointError: the placement of a gradient over `tp` cannot be saved.
    """
    wanted = {id(parameter) for parameter in parameters}
    names = {id(one): name for name, one in _gathered(model, groups).items()}
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is None or id(parameter) not in wanted:
            continue
        found[f"{_SHARDED}:{name}"] = local(grad)
        if isinstance(grad, DTensor) and grad.placements != parameter.placements:  # type: ignore[attr-defined]
            found[f"{_PLACEMENTS}:{name}"] = _numbers_of(grad.placements, name)
    for number, group in enumerate(groups):
        held = [one for one in group.fsdp_params if id(one.sharded_param) in wanted]
        for one in held:
            whole = unreduced(one)
            if whole is None:
                continue
            name = names[id(one)]
            found[f"{_WHOLE}:{name}"] = local(whole)
            if isinstance(whole, DTensor):
                found[f"{_PLACEMENTS}:{name}"] = _numbers_of(whole.placements, name)
        if held and group._partial_reduce_output is not None:
            found[f"{_PARTIAL}:{number}"] = group._partial_reduce_output
    return found


@torch.no_grad()
def write(
    model: nn.Module,
    groups: Sequence[Any],
    gradients: Mapping[str, torch.Tensor],
    factor: float | None,
) -> None:
    """Restore the gradients that `read` returned.

    Args:
        factor: None if the same mesh saved them. Otherwise, gradients are multiplied by this factor
            and added.

    Raises:
        CheckpointError: a different mesh saved the gradients, and they were already sharded.
    """
    _make_unsharded_parameters(model, groups)
    named = dict(model.named_parameters(remove_duplicate=False))
    gathered = _gathered(model, groups)
    match = key_matcher({**named, **gathered}, model)
    by_parameter = {id(one.sharded_param): one for one in gathered.values()}
    for key, value in gradients.items():
        kind, name = key.split(":", 1)
        if kind == _PLACEMENTS:
            continue
        placements = gradients.get(f"{_PLACEMENTS}:{name}")
        name = match(name)
        if kind == _WHOLE:
            parameter = gathered.get(name) or by_parameter[id(named[name])]
            value = value.to(local(parameter.sharded_param).device)
            if factor is None and placements is not None:
                value = _laid_out(parameter._unsharded_param, value, placements)
            elif factor is not None:
                value = _from_another_mesh(parameter, name, value * factor)
            _add(parameter, value)
        elif (
            factor is not None
            and kind == _SHARDED
            and placements is None
            and value.shape == named[name].shape
        ):
            # One rank saved the whole gradient, which is already the mean over ranks.
            sharded = named[name]
            part = _part_of(sharded, value.to(local(sharded).device) * factor)
            if sharded.grad is None:
                sharded.grad = part
            else:
                local(sharded.grad).add_(local(part))
        elif factor is not None:
            raise CheckpointError(
                "The checkpoint was saved in the middle of an accumulation cycle, on a different "
                f"mesh or number of ranks, and contains sharded gradients. {_WAY_OUT}"
            )
        elif kind == _PARTIAL:
            group = groups[int(name)]
            group._partial_reduce_output = value.to(group.device)
        else:
            sharded = named[name]
            value = value.to(local(sharded).device)
            if placements is None:
                sharded.grad = _like(sharded, value)
            else:
                sharded.grad = _laid_out(sharded, value, placements)


def _gathered(model: nn.Module, groups: Sequence[Any]) -> dict[str, Any]:
    """Return FSDP's parameters by name.

    If a tie was made after `fully_shard`, as Transformers does, FSDP gathers the parameter once for
    each of its names, and each of them has its own gradient.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    modules = {module: name for name, module in model.named_modules()}
    gathered = [one for group in groups for one in group.fsdp_params]
    uses = Counter(id(one.sharded_param) for one in gathered)
    found: dict[str, Any] = {}
    for one in gathered:
        name = names[id(one.sharded_param)]
        if uses[id(one.sharded_param)] > 1:
            info = one._module_info
            name = f"{modules[info.module]}.{info.param_name}".lstrip(".")
        found[name] = one
    return found


def _add(parameter: Any, value: torch.Tensor) -> None:
    present = unreduced(parameter)
    if present is not None:
        local(present).add_(local(value))
    elif "unsharded_accumulated_grad" in vars(parameter):  # up to torch 2.14
        parameter.unsharded_accumulated_grad = value
    else:
        parameter._unsharded_param.grad = value


def _laid_out(like: Any, value: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return a gradient on the mesh of `like`, with the saved placements."""
    return DTensor.from_local(
        value,
        like.device_mesh,
        [_placement_of(int(number)) for number in numbers],
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _from_another_mesh(parameter: Any, name: str, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a gradient that was whole on every rank of a different mesh."""
    shape = parameter.sharded_param.shape
    if value.shape != shape:
        raise CheckpointError(
            "The checkpoint was saved in the middle of an accumulation cycle, on a different mesh. "
            f"Its gradient of {name!r} has shape {list(value.shape)}, because it is split across tensor "
            f"parallel ranks. {_WAY_OUT}"
        )
    if not parameter.is_dtensor:
        return value
    like = parameter._unsharded_param
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def _make_unsharded_parameters(model: nn.Module, groups: Sequence[Any]) -> None:
    """Make torch create its unsharded parameters, which it otherwise does in the first forward.

    Their placements over `tp` are needed, and since torch 2.15 they accumulate the gradients.
    """
    for group in groups:
        for one in group.fsdp_params:
            needed = one.is_dtensor or "unsharded_accumulated_grad" not in vars(one)
            if needed and not hasattr(one, "_unsharded_param"):
                for module in model.modules():
                    if isinstance(module, FSDPModule):
                        module.unshard()
                        module.reshard()
                return


def _numbers_of(placements: Sequence[Placement], name: str) -> torch.Tensor:
    numbers = []
    for placement in placements:
        if isinstance(placement, Replicate):
            numbers.append(_REPLICATED)
        elif isinstance(placement, Partial) and placement.reduce_op == "sum":
            numbers.append(_SUMMED)
        elif type(placement) is Shard:
            numbers.append(placement.dim)
        else:
            raise CheckpointError(
                f"The gradient of {name!r} has the placement {placement} over tensor parallel ranks, "
                "which cannot be saved in the middle of an accumulation cycle. Save after an "
                "optimizer step, when accelerator.sync_gradients is True."
            )
    return torch.tensor(numbers)


def _placement_of(number: int) -> Placement:
    if number == _REPLICATED:
        return Replicate()
    return Partial("sum") if number == _SUMMED else Shard(number)


def _part_of(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def _like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
