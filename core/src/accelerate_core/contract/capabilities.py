"""What precisions need and backends accept, and when gradients are reduced: one vocabulary each."""

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

#: What a backend says by `reduces_gradients` -> when ranks have the gradients of all of them.
REDUCES_GRADIENTS = {
    "backward": "when the backward that synchronises has ended",
    "step": "when they are clipped, or their optimizer steps",
    "engine": "inside of the backend's engine, which owns them",
    "never": "never: each rank steps with its own",
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


def check_reduces_gradients(backend: Any, label: str, num_processes: int) -> None:
    """Refuse a backend that does not say when gradients are reduced, where there are several ranks.

    There is no default: a backend that forgot to reduce them trains every rank on its own, and
    nothing fails.

    Raises:
        PluginError: several processes were started and it says nothing, or it says a word that
            nobody knows.
    """
    said = getattr(backend, "reduces_gradients", None)
    if said in REDUCES_GRADIENTS or (said is None and num_processes == 1):
        return
    what = "does not say when gradients are reduced"
    if said is not None:
        what = f"has reduces_gradients={said!r}"
    meanings = "; ".join(f"{word!r}: {when}" for word, when in REDUCES_GRADIENTS.items())
    raise PluginError(
        f"The backend plugin {label} {what}, and {num_processes} process(es) were started. Let its "
        f"class have reduces_gradients = one of {listing(REDUCES_GRADIENTS)} ({meanings})."
        f"{did_you_mean(str(said), REDUCES_GRADIENTS)}"
    )
