"""What precisions need and backends accept, and when gradients are reduced: one vocabulary each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from accelerate_core.contract.hooks import is_newer
from accelerate_core.errors import PluginError, did_you_mean, listing, warn

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

#: Keys of a backend's `supports`, and words of its `owns`.
SUPPORTS = (
    "accepts", "precisions", "mesh", "devices", "no_sync", "join", "compile", "num_items", "gradients",
    "several_models", "exact", "own_mesh",
)  # fmt: skip
OWNS = ("precision", "device_placement", "accumulation", "optimizer", "checkpoint")

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


def check_words(plugin: object, words: Iterable[str], known: Collection[str], told: str) -> None:
    """Refuse words of a declaration that nobody knows; those of a newer contract are told.

    Args:
        told: whose they are and where they stand.

    Raises:
        PluginError: with the nearest right one.
    """
    for word in words:
        if word not in known:
            said = f"{told} has {word!r}; there are {listing(known)}."
            if not is_newer(plugin):
                raise PluginError(f"{said}{did_you_mean(word, known)}")
            warn(f"{said} It may be of a newer accelerate-core.")


def check_declarations(backend: Any, label: str) -> None:
    """Refuse a backend whose declarations nobody could read.

    `reduces_gradients` has no default: a backend that forgot to reduce them trains every rank on
    its own, and nothing fails.

    Raises:
        PluginError: an unknown word, or nothing about when gradients are reduced.
    """
    accepts = backend.supports.get("accepts", ())
    check_words(backend, accepts, NEEDS, f"supports['accepts'] of {label}")
    check_words(backend, backend.supports, SUPPORTS, f"supports of {label}")
    check_words(backend, backend.owns, OWNS, f"owns of {label}")
    check_words(backend, [backend.compile_at], ("before", "after", "own"), f"compile_at of {label}")
    said = getattr(backend, "reduces_gradients", None)
    if said not in REDUCES_GRADIENTS:
        meanings = "; ".join(f"{word!r}: {when}" for word, when in REDUCES_GRADIENTS.items())
        raise PluginError(
            f"{label} has reduces_gradients={said!r}. Let its class say when ranks have the gradients "
            f"of all of them ({meanings}).{did_you_mean(str(said or ''), REDUCES_GRADIENTS)}"
        )
