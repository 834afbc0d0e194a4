"""The facts that a backend gets about parameters that were frozen, unfrozen or added after `prepare`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TrainableChange:
    """How the trainable parameters of a prepared model differ from those the backend knows.

    Parameters are listed by the name that the user's own model gives them.

    Attributes:
        model: the prepared model.
        unfrozen: parameters that require gradients now and didn't before.
        frozen: parameters that required gradients before and don't now.
        added: parameters among `unfrozen` that the model didn't have before.
        removed: names of trainable parameters that the model had before.
    """

    model: torch.nn.Module
    unfrozen: Mapping[str, torch.Tensor]
    frozen: Mapping[str, torch.Tensor]
    added: Mapping[str, torch.Tensor]
    removed: tuple[str, ...] = ()

    def __str__(self) -> str:
        kept = [name for name in self.unfrozen if name not in self.added]
        parts: dict[str, Collection[str]] = {
            "unfrozen": kept,
            "frozen": self.frozen,
            "added": self.added,
            "removed": self.removed,
        }
        return "; ".join(f"{verb}: {shorten(names)}" for verb, names in parts.items() if names)


def shorten(names: Collection[str]) -> str:
    """Return up to three of the names, and how many more there are."""
    quoted = [repr(name) for name in names]
    more = f" and {len(quoted) - 3} more" if len(quoted) > 3 else ""
    return ", ".join(quoted[:3]) + more
