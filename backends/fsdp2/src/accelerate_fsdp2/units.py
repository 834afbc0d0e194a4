"""Find the modules whose parameters are sharded and gathered together."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from accelerate_core.plugin import ConfigurationError, PrepareError, did_you_mean, listing
from accelerate_fsdp2.settings import FullyShardedDataParallelPlugin

#: Minimum number of parameters of a unit with `size_based_wrap`. The same default as in torch.
_MIN_PARAMS = 100_000_000

Group = list[nn.Module]


def find_units(model: nn.Module, options: FullyShardedDataParallelPlugin) -> list[Group]:
    """Return the modules to shard before the model itself, innermost first.

    Modules that share a parameter are in the same group, so that the parameter stays tied.
    """
    chosen = set(_chosen(model, options)) - {model}
    return _joined(model, [module for module in model.modules() if module in chosen])


def _chosen(model: nn.Module, options: FullyShardedDataParallelPlugin) -> Iterable[nn.Module]:
    policy = options.auto_wrap_policy
    if policy == "no_wrap":
        return []
    if callable(policy):
        return _by_function(model, policy)
    if policy == "size_based_wrap":
        return _by_size(model, options.min_num_params or _MIN_PARAMS)
    named = list(options.transformer_cls_names_to_wrap or [])
    own = list(getattr(model, "_no_split_modules", None) or [])
    if policy == "transformer_based_wrap" and not named and not own:
        raise ConfigurationError(
            "auto_wrap_policy='transformer_based_wrap' needs transformer_cls_names_to_wrap, because "
            f"{type(model).__name__} does not name its layers in _no_split_modules."
        )
    if named or own:
        return _by_class(model, named or own, required=bool(named))
    found: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            # A module without a forward, such as a container, would never gather its parameters.
            called = type(child).forward is not nn.Module.forward
            if _is_stack(module) and called and any(True for _ in child.parameters()):
                found.append(child)  # nothing inside it, because ranks may call different parts
            else:
                walk(child)

    walk(model)
    return found


def _is_stack(module: nn.Module) -> bool:
    children = list(module.children())
    if isinstance(module, nn.ModuleList):
        return len(children) > 1
    alike = len({type(child) for child in children}) == 1
    return isinstance(module, nn.Sequential) and alike and len(children) > 1


def _by_class(model: nn.Module, names: list[str], required: bool) -> list[nn.Module]:
    kinds = {_class_name(module) for module in model.modules()}
    missing = [name for name in names if name not in kinds]
    if missing and required:
        raise ConfigurationError(
            f"transformer_cls_names_to_wrap: the model has no module of class {missing[0]!r}."
            f"{did_you_mean(missing[0], kinds)}"
        )
    return [module for module in model.modules() if _class_name(module) in names]


def _class_name(module: nn.Module) -> str:
    """Return the name of a layer's class. If a precision replaced the layer, the original class."""
    return str(vars(module).get("_replaced_class", type(module).__name__))


def _by_size(model: nn.Module, least: int) -> list[nn.Module]:
    found: list[nn.Module] = []

    def walk(module: nn.Module) -> int:
        left = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        left += sum(walk(child) for child in module.children())
        holder = isinstance(module, nn.ModuleList | nn.ModuleDict)
        if left >= least and not holder:
            found.append(module)
            return 0
        return left

    walk(model)
    return found


def _by_function(model: nn.Module, policy: Any) -> list[nn.Module]:
    if "recurse" not in inspect.signature(policy).parameters:
        return [module for module in model.modules() if policy(module)]

    def chosen(module: nn.Module) -> bool:  # the signature of torch's own policies
        numel = sum(parameter.numel() for parameter in module.parameters())
        return bool(policy(module=module, recurse=False, nonwrapped_numel=numel))

    return [module for module in model.modules() if chosen(module)]


def _joined(model: nn.Module, units: list[nn.Module]) -> list[Group]:
    """Merge units that share a parameter into one group, and sort groups innermost first."""
    inside = {id(model): model}
    for unit in units:  # outermost first, so that the innermost unit overwrites the others
        inside.update((id(module), unit) for module in unit.modules())
    holders: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            unit = inside.get(id(module), model)
            holders.setdefault(id(parameter), []).append(module if unit is model else unit)
    groups: list[Group] = [[unit] for unit in units]
    for modules in holders.values():
        distinct = list(dict.fromkeys(modules))
        together = [group for group in groups if any(one in group for one in distinct)]
        if len(distinct) < 2 or not together:
            continue  # all in the same unit, or none in a unit
        if model in distinct:  # one of the model's own parameters stays with the model
            groups = [group for group in groups if group not in together]
            continue
        merged = list(dict.fromkeys([*(one for group in together for one in group), *distinct]))
        # A member that is inside another member is covered by it.
        outer = [
            one
            for one in merged
            if not any(one is not other and one in set(other.modules()) for other in merged)
        ]
        groups = [*(group for group in groups if group not in together), outer]
    depth = {id(module): name.count(".") for name, module in model.named_modules()}
    return sorted(groups, key=lambda group: -min(depth[id(module)] for module in group))


def ignored_parameters(model: nn.Module, given: Any) -> dict[str, nn.Parameter]:
    """Return the parameters that are not sharded, by name: those in `given`, and scalars.

    Raises:
        ConfigurationError: a pattern matches no module, or a module is not in the model.
    """
    chosen: set[nn.Module] = set()
    if isinstance(given, str):
        names = [name for name, _ in model.named_modules() if name]
        chosen = {m for n, m in model.named_modules() if n and re.fullmatch(given, n)}
        if not chosen:
            raise ConfigurationError(
                f"ignored_modules={given!r} matches no module. The model has "
                f"{listing(names[:8])}{', ...' if len(names) > 8 else ''}."
            )
    elif given is not None:
        chosen = {vars(one).get("_replaced_by", one) for one in given}
        modules = set(model.modules())
        for module in chosen:
            if module not in modules:
                raise ConfigurationError(
                    f"ignored_modules has a {type(module).__name__} that is not in the model."
                )
    inside = {id(p) for module in chosen for p in module.parameters()}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) in inside or parameter.dim() == 0
    }


def check_groups(model: nn.Module, units: list[Group], ignored: set[nn.Parameter]) -> None:
    """Check the dtypes of each unit, which torch only checks in the first forward.

    Raises:
        PrepareError: the trainable parameters of a unit have several dtypes.
    """
    seen: set[int] = {id(parameter) for parameter in ignored}
    for group in [*units, [model]]:
        dtypes: dict[torch.dtype, str] = {}
        for name, parameter in (named for module in group for named in module.named_parameters()):
            if id(parameter) not in seen and parameter.requires_grad:
                dtypes.setdefault(parameter.dtype, name)
            seen.add(id(parameter))
        if len(dtypes) > 1:
            kinds = " and ".join(f"{dtype} ({name})" for dtype, name in dtypes.items())
            raise PrepareError(
                f"The trainable parameters of {type(group[0]).__name__} have several dtypes: "
                f"{kinds}. FSDP2 gathers the parameters of a unit together. Convert them to one "
                "dtype, freeze some, or put them into separate units with auto_wrap_policy."
            )


def prefetch_forward(blocks: list[nn.Module], model: nn.Module) -> None:
    """Gather the next block while one computes, in the order in which the model has them."""
    order = {id(module): number for number, module in enumerate(model.modules())}
    blocks = sorted(blocks, key=lambda block: order[id(block)])
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])  # type: ignore[operator]


def offload_saved(module: nn.Module, device: torch.device) -> None:
    """Keep the activations that a module saves for backward in host memory."""
    forward = module.forward

    def offloaded(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=device.type != "cpu"):
            return forward(*args, **kwargs)

    module.forward = offloaded
