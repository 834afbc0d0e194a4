"""The source of each value, which the launcher passes on to its processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: JSON of {environment variable: origin}, set by the launcher for its children.
PROVENANCE_VARIABLE = "ACCELERATE_PROVENANCE"


@dataclass(frozen=True)
class SourcedValue:
    """A resolved value with its origin, such as `command line --mixed_precision`."""

    value: Any
    origin: str

    def __str__(self) -> str:
        return f"{self.value!r} ({self.origin})"


def decode(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the origins that the launcher set, by variable. Invalid JSON is ignored."""
    try:
        said = json.loads(environ.get(PROVENANCE_VARIABLE, "{}"))
    except ValueError:
        return {}
    return {str(k): str(v) for k, v in said.items()} if isinstance(said, dict) else {}


def variable_origin(name: str, environ: Mapping[str, str]) -> str:
    """Return the source of the value of an environment variable."""
    return decode(environ).get(name) or f"environment variable {name}"
