"""What is installed and what would be active now, for people and machines; no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from accelerate_core.errors import AccelerateError, PluginError
from accelerate_core.hookspecs import API_VERSION
from accelerate_core.plugins.discovery import (
    OWN_DISTRIBUTION,
    PluginRecord,
    disabled_names,
    installed,
)
from accelerate_core.plugins.selection import Request, select_backend, select_extensions
from accelerate_core.plugins.static import stated
from accelerate_core.runtime import read_topology

__all__ = ["PluginRow", "api_of", "report", "tracker_state"]


@dataclass(frozen=True)
class PluginRow:
    """One line of `accelerate-core plugins`."""

    kind: str
    name: str
    distribution: str
    version: str
    api_version: str
    state: str
    because: str

    def as_dict(self) -> dict[str, Any]:
        """Return the row as JSON knows it."""
        return asdict(self)


def report(
    environ: Mapping[str, str] | None = None, *, ask_trackers: bool = False
) -> list[PluginRow]:
    """List every installed plugin with its state under this environment.

    States: active, available, passed over, refused, broken, disabled.
    Only what the environment asks for is imported; with `ask_trackers` the trackers too, which
    then say whether `log_with="all"` can use them, but not their libraries.
    """
    # Here, not above: the launcher imports this package, and not what resolving costs.
    from accelerate_core.configuration.resolve import Sources, resolve_core

    environ = dict(os.environ if environ is None else environ)
    sources = Sources.of(environ)
    values = resolve_core({}, sources, {})
    request = Request({}, environ, read_topology(environ), sources.config)
    states: dict[tuple[str, str], tuple[str, str]] = {}
    try:
        chosen = select_backend(values["backend"].value, values["backend"].origin, request)
        for entry in chosen.considered:
            states[entry.record.kind, entry.record.name] = (entry.state, entry.because)
    except AccelerateError as error:
        named = values["backend"].value
        if named is not None:
            states["backend", str(named)] = ("refused", str(error))
    try:
        for record, _, because in select_extensions(request):
            states["extension", record.name] = ("active", because)
    except AccelerateError:
        pass  # a broken extension shows below by its failure
    precision = values["mixed_precision"]
    states["precision", str(precision.value)] = ("active", precision.origin)
    disabled = disabled_names(environ)
    rows = []
    for record in installed().plugins:
        state, because = states.get((record.kind, record.name), ("available", "not asked for"))
        if ask_trackers and record.kind == "tracker" and record.name not in disabled:
            state, because = tracker_state(record, environ)
        if record.name in disabled:
            state, because = "disabled", "ACCELERATE_DISABLED_PLUGINS"
        elif record.failure is not None:
            state, because = "broken", f"{type(record.failure).__name__}: {record.failure}"
        elif state == "available":
            state, because = _from_source(record, because)
        rows.append(
            PluginRow(
                record.kind,
                record.name,
                record.distribution,
                record.version,
                api_of(record),
                state,
                because,
            )
        )
    return rows


def api_of(record: PluginRecord) -> str:
    """Return the version of the contract a plugin states, "" if that cannot be told."""
    version = getattr(record.load(), "api_version", None) if record.is_loaded else None
    if version is None:
        own = record.distribution == OWN_DISTRIBUTION
        version = API_VERSION if own else stated(record.target).api_version
    return ".".join(str(part) for part in version) if version else ""


def _from_source(record: PluginRecord, because: str) -> tuple[str, str]:
    """Tell without an import what would not work if it were asked for."""
    if not record.is_loaded and (missing := stated(record.target).missing):
        return "broken", f"its entry point names {record.target}, but {missing}"
    api = api_of(record)
    if api and int(api.split(".")[0]) != API_VERSION[0]:
        return "refused", _other_version(api)
    return "available", because


def tracker_state(record: PluginRecord, environ: Mapping[str, str]) -> tuple[str, str]:
    """Tell what `log_with="all"` would do with a tracker."""
    try:
        tracker = record.load()
    except PluginError:
        return "broken", ""
    asks = getattr(tracker, "unusable", None)
    why = asks(environ) if asks is not None else "it is no GeneralTracker class"
    if why:
        return "passed over", why
    api = api_of(record)
    if api and int(api.split(".")[0]) != API_VERSION[0]:
        return "refused", _other_version(api)
    if getattr(tracker, "requires_logging_directory", False) is True:
        return "available", "log_with='all' uses it where a project_dir is given"
    return "available", "log_with='all' uses it"


def _other_version(theirs: str) -> str:
    ours = ".".join(map(str, API_VERSION))
    return f"written for version {theirs} of the contract; this core speaks {ours}"
