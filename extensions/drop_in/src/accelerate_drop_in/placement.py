"""Helpers of device maps, for scripts that plan their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate_big_model.tensors import within
from accelerate_checkpoint.weights import convert_file_size_to_int

_Named = tuple[str, Any]


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Say whether two devices are one: without a number, an accelerator is the first."""
    first, second = (
        (one.type, one.index if one.type == "cpu" else one.index or 0)
        for one in (first_device, second_device)
    )
    return first == second


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """Return the names that are no part of another one's name."""
    parents = {name.rpartition(".")[0] for name in module_sizes}
    return [name for name in module_sizes if name and name not in parents]


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[_Named],
) -> tuple[int, list[str], list[Any]]:
    """Return a module's bytes with those of the modules tied to it, their names, and these.

    Args:
        tied_params: names of parameters elsewhere that are the module's own, too.
        modules_to_treat: where they are looked for.
    """
    owners = [
        next((name, one) for name, one in modules_to_treat if parameter.startswith(f"{name}."))
        for parameter in tied_params
    ]
    more = sum(
        module_sizes[name] - module_sizes[parameter]
        for parameter, (name, _) in zip(tied_params, owners, strict=True)
    )
    return module_size + more, [name for name, _ in owners], [one for _, one in owners]


def fallback_allocate(
    modules: Sequence[_Named],
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: Sequence[str] | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, Any, list[_Named]]:
    """Find a module, or a part of one, that fits into a size.

    The outermost first, in order.

    Returns:
        Its name, the module, and what is left: (None, None, `modules`) if nothing fits.
    """
    limit = convert_file_size_to_int(size_limit)
    queue, split = list(modules), set(no_split_module_classes or ())
    while queue:
        name, module = queue.pop(0)
        groups = [
            group
            for group in tied_parameters or ()
            if len({within(parameter, name) for parameter in group}) > 1
        ]
        tied = [one for group in groups for one in group if not within(one, name)]
        if get_module_size_with_ties(tied, module_sizes[name], module_sizes, queue)[0] <= limit:
            return name, module, _without(modules, name)
        if isinstance(module, nn.Module) and type(module).__name__ not in split:
            queue = _parts(name, module) + queue
    return None, None, list(modules)


def _parts(name: str, module: nn.Module) -> list[_Named]:
    if next(module.children(), None) is None:
        return []
    parts = [*module.named_parameters(recurse=False), *module.named_children()]
    return [(f"{name}.{part}", one) for part, one in parts]


def _without(modules: Sequence[_Named], found: str) -> list[_Named]:
    """Return the modules with the one that holds what was found replaced by its other parts."""
    left: list[_Named] = []
    for name, module in modules:
        if name == found:
            continue
        if within(found, name):
            left += _without(_parts(name, module), found)
        else:
            left.append((name, module))
    return left
