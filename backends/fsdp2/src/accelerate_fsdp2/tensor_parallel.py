"""Tensor parallelism: plans that map module names to styles, checked before anything changes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from accelerate_core.plugin import ConfigurationError, did_you_mean, listing
from accelerate_fsdp2 import quantized

_STYLES: dict[str, Any] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # Activations between layers are split along the sequence.
    "sequence": SequenceParallel,
    "split_sequence": lambda: PrepareModuleOutput(
        output_layouts=Replicate(), desired_output_layouts=Shard(1)
    ),
    "colwise_sequence": lambda: ColwiseParallel(input_layouts=Shard(1)),
    "rowwise_sequence": lambda: RowwiseParallel(output_layouts=Shard(1)),
    "colwise_sequence_rep": lambda: ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Replicate()
    ),
    # Names that models in Transformers use.
    "sequence_parallel": SequenceParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    # For torch's loss_parallel, which needs sharded logits.
    "colwise_loss": lambda: ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
}
#: Styles that don't split a module. With the second, each rank uses the module for a part of the
#: heads, so its gradients must be summed.
_WHOLE, _ADDED = "replicate", "replicated_with_grad_allreduce"

_SPLIT_ADAPTERS = (
    "Let Transformers split the layers while it loads them, and then add the adapters: "
    "from_pretrained(..., distributed_config=DistributedConfig(tp_size=...)). Or pass a plan that names "
    "the layers inside: 'base_layer' and 'lora_B.default' as 'colwise', 'base_layer' and 'lora_A.default' "
    "as 'rowwise'."
)


def parallelise(model: nn.Module, mesh: DeviceMesh, given: Mapping[str, Any] | None) -> list[str]:
    """Split the modules in a plan over the ranks of a one-dimensional mesh.

    Tied parameters stay tied.

    Args:
        given: a plan to use instead of the model's own.

    Returns:
        The names of unsplit parameters whose gradients must be summed over the ranks.

    Raises:
        ConfigurationError: there is no plan, a name matches no module, a style is unknown, a
            dimension is not divisible by the number of ranks, or a tie would be broken.
    """
    plan = given or getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not plan:
        raise ConfigurationError(
            f"Tensor parallelism needs a plan, but {type(model).__name__} has no tp_plan. Pass one, "
            "such as ParallelismConfig(tp_handler=TorchTensorParallelConfig(plan={'layers.*.fc1': "
            "'colwise', 'layers.*.fc2': 'rowwise'}))."
        )
    if not given and hasattr(model, "peft_config"):
        raise ConfigurationError(
            f"{type(model).__name__} has adapters of PEFT, and its tp_plan is for the model without them. "
            + _SPLIT_ADAPTERS
        )
    matches = _matches(model, plan)
    modules = dict(model.named_modules())
    added = [
        f"{name}.{own}"
        for name, _, style in matches
        if style == _ADDED
        for own, _ in modules[name].named_parameters()
    ]
    styles = {name: _style(pattern, style) for name, pattern, style in matches}
    styled = {name: style for name, style in styles.items() if style is not None}
    for name, style in styled.items():
        _check_divides(name, modules[name], style, mesh.size())
    ties = _ties(model)
    parallelize_module(model, mesh, styled)
    _retie(ties)
    return added


def _matches(model: nn.Module, plan: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    names = [name for name, _ in model.named_modules() if name]
    found = []
    for pattern, style in plan.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        hits = [name for name in names if expression.fullmatch(name)]
        if not hits:
            general = sorted({re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names})
            raise ConfigurationError(
                f"{pattern!r} in the tensor parallel plan matches no module of "
                f"{type(model).__name__}.{did_you_mean(pattern, general)}"
            )
        found += [(name, pattern, style) for name in hits]
    return found


def _style(pattern: str, style: Any) -> ParallelStyle | None:
    if isinstance(style, ParallelStyle):
        return style
    if isinstance(style, str) and style in (_WHOLE, _ADDED):
        return None
    if not isinstance(style, str) or style not in _STYLES:
        raise ConfigurationError(
            f"The tensor parallel plan has an unknown style {style!r} for {pattern!r}. Allowed "
            f"styles are {listing([*_STYLES, _WHOLE, _ADDED])} and torch's ParallelStyle objects."
            f"{did_you_mean(str(style), _STYLES)}"
        )
    made: ParallelStyle = _STYLES[style]()
    return made


def _check_divides(name: str, module: nn.Module, style: ParallelStyle, ranks: int) -> None:
    if isinstance(style, ColwiseParallel):
        dims = {nn.Linear: "out_features", nn.Embedding: "embedding_dim"}
    elif isinstance(style, RowwiseParallel):
        dims = {nn.Linear: "in_features", nn.Embedding: "num_embeddings"}
    else:
        return
    if hasattr(module, "base_layer"):
        raise ConfigurationError(
            f"The tensor parallel plan splits {name!r}, which is a layer with an adapter. "
            + _SPLIT_ADAPTERS
        )
    if quantized.is_packed(module):
        raise ConfigurationError(
            f"The tensor parallel plan splits {name!r}, but bitsandbytes has quantized it, so it can't be "
            "split. Shard the model with dp_shard_size instead, or load it without quantization."
        )
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise ConfigurationError(
            f"The tensor parallel plan splits {name!r}, a {type(module).__name__}, but its style "
            "only supports Linear and Embedding. Name the layers inside it, or use your own "
            "ParallelStyle."
        )
    for kind, attribute in dims.items():
        if isinstance(module, kind) and getattr(module, attribute) % ranks:
            raise ConfigurationError(
                f"{attribute}={getattr(module, attribute)} of {name!r} is not divisible by "
                f"tp_size={ranks}. Change the size, or remove this module from the plan."
            )


#: Where a parameter is stored: its full name, the module, and its name in the module.
_Slot = tuple[str, nn.Module, str]


def _ties(model: nn.Module) -> list[list[_Slot]]:
    by: dict[int, list[_Slot]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                slot = (f"{prefix}.{name}" if prefix else name, module, name)
                by.setdefault(id(parameter), []).append(slot)
    return [slots for slots in by.values() if len(slots) > 1]


def _retie(ties: list[list[_Slot]]) -> None:
    for (first_name, first_module, first), *others in ties:
        kept = first_module._parameters[first]
        for name, module, attribute in others:
            other = module._parameters[attribute]
            if other is kept:
                continue
            one, two = getattr(kept, "placements", None), getattr(other, "placements", None)
            if one != two:
                raise ConfigurationError(
                    f"{first_name!r} and {name!r} are the same parameter, but the tensor parallel "
                    f"plan gives them different placements, {one or 'whole'} and {two or 'whole'}. "
                    "Use styles that split it along the same dimension ('rowwise' for an embedding "
                    "and 'colwise' for a head), or remove both from the plan."
                )
            module._parameters[attribute] = kept
