"""Digests of settings, for ranks to compare."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

#: Settings of at most this many characters are exchanged in full; longer ones as a digest.
_SHOWN = 200


def comparable(value: Any) -> Any:
    """Return plain data that is equal on two ranks if and only if the setting is equal.

    Addresses in memory and the order of mappings and sets don't matter. A long value is replaced by
    its beginning and a digest.
    """
    if value is None or isinstance(value, str | int):
        return value
    text = json.dumps(value, sort_keys=True, default=_plain)
    if len(text) > _SHOWN:
        digest = hashlib.sha256(text.encode()).hexdigest()
        text = f"{text[:_SHOWN]}... (digest {digest[:12]})"
    return text


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    name = getattr(value, "__qualname__", None)  # a class or a function
    text = str(value) if name is None else f"{value.__module__}.{name}"
    # The default text of an object contains its address, so compare its class instead.
    return type(value).__qualname__ if " at 0x" in text else text
