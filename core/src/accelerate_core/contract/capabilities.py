"""The words with which precisions and backends declare what they need and support."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from accelerate_core.contract.hooks import is_newer
from accelerate_core.errors import PluginError, did_you_mean, listing, warn

#: Word in a precision's `needs` -> what such a precision does.
NEEDS = {
    "autocast": "the forward pass runs in an autocast context",
    "loss_scaling": "the loss is scaled, and steps whose gradients overflow are skipped",
    "modules": "layers are replaced",
    "parameters": "the dtype of parameters changes",
    "subclasses": "parameters become tensor subclasses",
    "optimizer": "the optimizer is replaced",
    "forward_collectives": "ranks communicate during the forward pass",
}

#: Keys that a backend may use in `supports`, and words that it may use in `owns`.
SUPPORTS = (
    "accepts", "precisions", "mesh", "devices", "no_sync", "join", "compile", "num_items", "gradients",
    "several_models", "exact", "own_mesh", "elastic",
)  # fmt: skip
OWNS = ("precision", "device_placement", "accumulation", "optimizer", "checkpoint")

#: Value of a backend's `reduces_gradients` -> when the gradients of all ranks have been combined.
REDUCES_GRADIENTS = {
    "backward": "at the end of the backward pass that synchronises",
    "step": "when gradients are clipped or their optimizer steps",
    "engine": "inside the backend's engine, which owns the gradients",
    "never": "never; each rank steps with its own gradients",
}

#: What a backend accepts if it declares nothing, because the methods of `Backend` support it.
ACCEPTED_BY_DEFAULT = ("autocast", "loss_scaling", "modules")


def lacking(supports: Mapping[str, Any], precision: str, needs: Collection[str]) -> list[str]:
    """Return the needs of a precision that a backend does not accept; empty if they match.

    Args:
        supports: the backend's declarations. Precisions listed in `precisions` always match.
        precision: name of the precision.
        needs: words of `NEEDS`.
    """
    if precision in (supports.get("precisions") or ()):
        return []
    accepted = supports.get("accepts", ACCEPTED_BY_DEFAULT)
    return [word for word in NEEDS if word in needs and word not in accepted]


def check_words(plugin: object, words: Iterable[str], known: Collection[str], where: str) -> None:
    """Refuse unknown words in a declaration. For a plugin of a newer contract, only warn.

    Args:
        where: the declaration and its plugin, for the error.

    Raises:
        PluginError: names the unknown word and the nearest known one.
    """
    for word in words:
        if word not in known:
            problem = f"{where} contains the unknown word {word!r}. The words are {listing(known)}."
            if not is_newer(plugin):
                raise PluginError(f"{problem}{did_you_mean(word, known)}")
            warn(
                f"{problem} The plugin was written for a newer accelerate-core, which may know it."
            )


def check_declarations(backend: Any, label: str) -> None:
    """Refuse a backend with incomplete or unknown declarations.

    `reduces_gradients` has no default. If a backend forgot to reduce gradients, every rank would train its
    own model without any error.

    Raises:
        PluginError: a declaration contains an unknown word, or `reduces_gradients` is missing.
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
            f"{label} has reduces_gradients={said!r}. Set this attribute of the class to when the "
            f"gradients of all ranks are combined ({meanings})."
            f"{did_you_mean(str(said or ''), REDUCES_GRADIENTS)}"
        )
