"""Sums of weights, with which ranks find out whether they train different models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

#: The number of elements that one comparison of weights reads. Larger models are compared in parts.
_ELEMENTS = 2**22


def weight_sums(
    parameters: Iterable[tuple[str, Any]], turn: int = 0, limit: int = _ELEMENTS
) -> dict[str, int]:
    """Return the sum of the bits of each parameter, by name.

    The sum of equal bits does not depend on the order in which a device adds them. Sharded and empty
    parameters, and parameters that exist on one rank only, are left out.

    Args:
        parameters: names and parameters.
        turn: which part of a large model to read. The caller increments it for each call.
        limit: elements per part. A parameter is always read as a whole.
    """
    whole = [
        (name, one.detach())
        for name, one in parameters
        if type(getattr(one, "data", None)) is torch.Tensor  # MS-AMP's parameters have no data
        and not hasattr(one, "placements")
        and one.numel()
        and not one.is_meta
        and getattr(one, "allreduce", True)  # False for experts that are on this rank only
    ]
    parts = -(-sum(one.numel() for _, one in whole) // limit) or 1
    chosen = whole[turn % parts :: parts]
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = []
    for _, one in chosen:
        real = torch.view_as_real(one) if one.is_complex() else one
        kind = kinds[real.element_size()]
        total = real.contiguous().view(kind).sum(dtype=torch.int64)
        sums.append(total.to(chosen[0][1].device))
    # All sums are read from the device at once.
    values = torch.stack(sums).tolist() if sums else []
    return dict(zip((name for name, _ in chosen), values, strict=True))


def first_difference(ranks: Sequence[Mapping[str, int] | None]) -> tuple[int, str, int] | None:
    """Return the first rank that differs from rank 0, its first differing parameter, and how many differ.

    Args:
        ranks: the result of `weight_sums` on each rank, or None if a rank has none.
    """
    first = ranks[0]
    for rank, other in enumerate(ranks):
        if first is None or other is None:
            continue
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if names:
            return rank, names[0], len(names)
    return None
