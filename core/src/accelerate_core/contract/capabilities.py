"""What a precision needs and a backend accepts, in one vocabulary: strangers then fit each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from accelerate_core.errors import PluginError, did_you_mean, listing

#: Word -> what happens to a model or its training under a precision that needs it.
NEEDS = {
    "autocast": "forward runs inside of an autocast context",
    "loss_scaling": "the loss is scaled, and steps that overflow are skipped",
    "modules": "layers are replaced",
    "parameters": "parameters change their dtype",
    "subclasses": "parameters become tensor subclasses",
    "optimizer": "the optimizer is replaced",
    "forward_collectives": "ranks communicate in forward",
}

#: What the methods of `Backend` do right by themselves.
ACCEPTED_BY_DEFAULT = ("autocast", "loss_scaling", "modules")


def lacking(supports: Mapping[str, Any], precision: str, needs: Collection[str]) -> list[str]:
    """Return what a precision needs and a backend does not accept; nothing where they fit.

    Args:
        supports: of the backend. `precisions` names those it brings about by itself.
        precision: name of the precision.
        needs: words of `NEEDS`.
    """
    if precision in (supports.get("precisions") or ()):
        return []
    accepted = supports.get("accepts", ACCEPTED_BY_DEFAULT)
    return [word for word in NEEDS if word in needs and word not in accepted]


def check_words(words: Collection[str], label: str, where: str) -> None:
    """Refuse words that nobody knows.

    Raises:
        PluginError: with the nearest right one.
    """
    for word in words:
        if word not in NEEDS:
            raise PluginError(
                f"{label} has {word!r} in {where}; there are {listing(NEEDS)}."
                f"{did_you_mean(word, NEEDS)}"
            )
