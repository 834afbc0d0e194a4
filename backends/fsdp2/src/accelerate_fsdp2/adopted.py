"""Models that were sharded before `prepare`: by Transformers, `fully_shard` or `parallelize_module`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelerate_core.plugin import ParallelismConfig, PrepareError
from accelerate_fsdp2.gradients import groups_of

#: The ranks of one dimension that this rank belongs to, in order.
Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks: the ranks in each dimension that contain this rank.

    Attributes:
        dp_replicate: ranks that hold copies of this rank's shards.
        dp_shard: ranks over which `fully_shard` splits parameters.
        tp: ranks over which layers are split.
        fully_sharded: whether `fully_shard` was applied.
    """

    dp_replicate: Ranks
    dp_shard: Ranks
    tp: Ranks
    fully_sharded: bool

    def __str__(self) -> str:
        sizes = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
        shown = [f"{name} {len(ranks)}" for name, ranks in sizes.items() if len(ranks) > 1]
        return " x ".join(shown or ["dp_shard 1"])

    def as_config(self) -> str:
        """Return the `ParallelismConfig` with these sizes, as source code."""
        sizes = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
        given = [f"{name}_size={len(ranks)}" for name, ranks in sizes.items() if len(ranks) > 1]
        return f"ParallelismConfig({', '.join(given)})"


def layout_of(model: nn.Module) -> Layout | None:
    """Return the layout of a model that is already sharded, or None if it is not.

    Raises:
        PrepareError: parts of the model are sharded across different ranks, as with expert parallelism.
    """
    here = (dist.get_rank(),) if dist.is_initialized() else (0,)
    replicas: dict[Ranks, None] = {}
    shards: dict[Ranks, None] = {}
    for group in groups_of(model):
        info = group.mesh_info
        for dimension, found in (
            (info.replicate_mesh_dim, replicas),
            (info.shard_mesh_dim, shards),
        ):
            ranks = here if dimension is None else _ranks(info.mesh, dimension)
            found[ranks] = None
    fully_sharded = bool(shards)
    split: dict[Ranks, None] = {}
    distributed = False
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            distributed = True
            mesh = parameter.device_mesh
            for dimension in range(mesh.ndim):
                ranks = _ranks(mesh, dimension)
                if len(ranks) > 1 and ranks not in replicas and ranks not in shards:
                    split[ranks] = None
    if not distributed and not fully_sharded:
        return None
    for found in (replicas, shards, split):
        if len(found) > 1:
            groups = " and ".join(str(list(ranks)) for ranks in found)
            raise PrepareError(
                f"Parts of {type(model).__name__} are sharded across different ranks: {groups}. This "
                "backend trains models with one mesh for all layers. Expert parallelism is not "
                "supported."
            )
    return Layout(
        dp_replicate=next(iter(replicas), here),
        dp_shard=next(iter(shards), here),
        tp=next(iter(split), here),
        fully_sharded=fully_sharded,
    )


def _ranks(mesh: DeviceMesh, dimension: int) -> Ranks:
    return tuple(dist.get_process_group_ranks(mesh.get_group(dimension)))


def check_layout(model: nn.Module, layout: Layout, config: ParallelismConfig) -> None:
    """Compare a model's layout with the mesh of the Accelerator.

    Data parallel dimensions are only compared if `fully_shard` was applied. Otherwise, the backend
    applies it.

    Raises:
        PrepareError: they differ, and the message has both. Or only parts of the model are sharded, or a
            wrapper has added weights that FSDP2 can't gather.
    """
    if layout.fully_sharded and not isinstance(model, FSDPModule):
        if not _is_wrapper(model):
            raise PrepareError(
                f"fully_shard was applied to parts of {type(model).__name__}, but not to the model "
                "itself. Call fully_shard(model) after its parts."
            )
        _check_wrapper(model, layout)
    wanted = _wanted(config)
    compared = ["tp"]
    if layout.fully_sharded:
        compared = ["dp_replicate", "dp_shard", "tp"]
    different = [name for name in compared if getattr(layout, name) != getattr(wanted, name)]
    if not different:
        return
    kind = type(model).__name__
    if all(len(getattr(layout, n)) == len(getattr(wanted, n)) for n in different):
        name = different[0]
        raise PrepareError(
            f"{kind} is already sharded as {layout}, and so is parallelism_config, but over other "
            f"ranks: this rank shares {name} with {list(getattr(layout, name))} in the model, and "
            f"with {list(getattr(wanted, name))} in the Accelerator. Shard the model on "
            "accelerator.torch_device_mesh, or order the dimensions of your mesh as dp_replicate, "
            "dp_shard, tp."
        )
    raise PrepareError(
        f"{kind} is already sharded as {layout}, but parallelism_config of the Accelerator is "
        f"{config.arithmetic()}. A sharded model cannot be sharded again. Pass "
        f"parallelism_config={layout.as_config()} to the Accelerator, or shard the model as "
        "parallelism_config says."
    )


def _is_wrapper(model: nn.Module) -> bool:
    """Return whether `fully_shard` was applied to a module inside that has all parameters.

    PEFT wraps models in this way.
    """
    inner = next((one for one in model.modules() if isinstance(one, FSDPModule)), None)
    if inner is None:
        return False
    return {id(p) for p in inner.parameters()} == {id(p) for p in model.parameters()}


def _check_wrapper(model: nn.Module, layout: Layout) -> None:
    """Check what a wrapper, such as PEFT's, has added to a model after `fully_shard`.

    Raises:
        PrepareError: layers are also split over `tp`, or a weight was made from one that was sharded.
    """
    kind = type(model).__name__
    instead = (
        "Load the model whole, without distributed_config, call get_peft_model, and let prepare shard "
        "both."
    )
    if len(layout.tp) > 1:
        raise PrepareError(
            f"{kind} wraps a model that is sharded as {layout}. Adapters can be added to a model that is "
            f"sharded or split when it is loaded, but not to one that is both. {instead}"
        )
    places = [record._module_info for group in groups_of(model) for record in group.fsdp_params]
    gathered = {id(getattr(place.module, place.param_name)) for place in places}
    for name, parameter in model.named_parameters():
        if id(parameter) not in gathered and (
            isinstance(parameter, DTensor) or not _has_memory(parameter)
        ):
            raise PrepareError(
                f"{name!r} of {kind} was created from a weight that was already sharded, so FSDP2 doesn't "
                "gather it. PEFT does that for modules_to_save and some initializations, such as "
                f"PiSSA. {instead}"
            )


def _has_memory(parameter: nn.Parameter) -> bool:
    """Return False if `parameter.data` was set to a DTensor, which leaves a plain tensor without memory."""
    if is_traceable_wrapper_subclass(parameter):  # its parts have the memory
        return True
    try:
        parameter.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


def _wanted(config: ParallelismConfig) -> Layout:
    """Return the layout of models that the backend shards itself."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    at = config.coordinates(rank)

    def along(*names: str) -> Ranks:
        return tuple(
            other
            for other in range(config.total_size)
            if all(
                name in names or index == at[name]
                for name, index in config.coordinates(other).items()
            )
        )

    return Layout(
        along("dp_replicate"), along("dp_shard", "cp", "sp"), along("tp"), fully_sharded=True
    )


def shard_mesh(model: nn.Module, own: DeviceMesh, config: ParallelismConfig) -> DeviceMesh:
    """Return the mesh on which `fully_shard` splits a model whose layers are already split.

    torch requires both meshes to be parts of one mesh. That is the Accelerator's, or the one on which
    the layers were split.

    Args:
        own: the part of the Accelerator's mesh over which it shards models.

    Raises:
        PrepareError: the mesh of the layers has no dimension over these ranks.
    """
    split = next((p for p in model.parameters() if isinstance(p, DTensor)), None)
    if split is None:
        return own
    root = split.device_mesh._get_root_mesh()
    if root == own._get_root_mesh():
        return own
    wanted = _wanted(config)
    needed = [wanted.dp_shard]
    if config.dp_replicate_enabled:
        needed = [wanted.dp_replicate, wanted.dp_shard]
    names = root.mesh_dim_names or ()
    by_ranks = {_ranks(root, number): name for number, name in enumerate(names)}
    if not all(ranks in by_ranks for ranks in needed):
        raise PrepareError(
            f"The layers of {type(model).__name__} are split on the mesh {root}. "
            f"parallelism_config ({config.arithmetic()}) shards it across the ranks "
            f"{list(wanted.dp_shard)}, but that mesh has no dimension over these ranks. Split the layers "
            "on accelerator.torch_device_mesh['tp'], or on a part of a mesh that has both dimensions."
        )
    chosen = tuple(by_ranks[ranks] for ranks in needed)
    return root[chosen] if len(chosen) > 1 else root[chosen[0]]


#: PEFT adds this to the names of a model's parameters.
_PEFT = "base_model.model."

#: Options that only have an effect when the backend applies `fully_shard`, with their defaults.
_APPLIED_WHEN_SHARDING: dict[str, Any] = {
    "auto_wrap_policy": None,
    "reshard_after_forward": None,
    "mixed_precision_policy": None,
    "cpu_offload": None,
    "ignored_modules": None,
    "activation_checkpointing": None,
}


def ignored_options(options: Any) -> list[str]:
    """Return the names of options that were set, but have no effect on a model sharded earlier."""
    return [
        name
        for name, default in _APPLIED_WHEN_SHARDING.items()
        if getattr(options, name) not in (default, False)
    ]


def correct_sizes(model: nn.Module) -> None:
    """Give linear layers with split weights the size of the whole weight.

    PEFT creates the adapters of split layers with the size of one part. Transformers multiplies that by
    the number of parts again in forward.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) and isinstance(module.weight, DTensor):
            module.out_features, module.in_features = module.weight.shape


def share_padding(groups: Sequence[Any]) -> None:
    """Let all of torch's records of one tied parameter gather the same memory.

    Transformers ties weights after `fully_shard`, so torch has a record for each place in which a weight
    is used. If its rows can't be divided evenly, each record moves the rank's part into padded memory of
    its own. The optimizer then updates only the memory of the last one, and the others gather old values.
    """
    records: dict[int, list[Any]] = {}
    for group in groups:
        for record in group.fsdp_params:
            record.reset_sharded_param()  # Transformers replaces parameters while it loads them
            records.setdefault(id(record.sharded_param), []).append(record)
    for tied in records.values():
        if len(tied) > 1:
            for record in tied:
                # torch calls this again in the first forward, and when tensors of the model are replaced.
                record.reset_sharded_param = partial(_reset_tied, record, tied)
            tied[0].reset_sharded_param()


def _reset_tied(record: Any, tied: Sequence[Any]) -> None:
    type(record).reset_sharded_param(record)
    for other in tied:
        if other.sharded_param is record.sharded_param:
            other._sharded_param_data = record._sharded_param_data


def summed_by_transformers(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose gradients Transformers sums over the ranks of `tp` with hooks."""
    plan = getattr(model, "tp_plan", None) or {}
    styled = [name for name, style in plan.items() if style == "replicated_with_grad_allreduce"]
    if not styled:
        return []
    return [
        parameter
        for name, parameter in model.named_parameters()
        if re.sub(r"\.\d+(?=\.|$)", ".*", name.removeprefix(_PEFT)).rpartition(".")[0] in styled
    ]
