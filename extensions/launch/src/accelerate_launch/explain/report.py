"""What is installed and what would be active now, for people and machines; no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from accelerate_core.config.provenance import Because
from accelerate_core.errors import AccelerateError, PluginError
from accelerate_core.hookspecs import API_VERSION
from accelerate_core.plugins.discovery import (
    OWN_DISTRIBUTION,
    PluginRecord,
    disabled_names,
    find,
    installed,
)
from accelerate_core.plugins.parts import DEFAULTS, select_part
from accelerate_core.plugins.selection import select_backend, select_extensions
from accelerate_launch.explain.situation import Situation
from accelerate_launch.explain.static import stated

__all__ = ["PluginRow", "Survey", "api_of", "precision_state", "report", "survey", "tracker_state"]


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


@dataclass(frozen=True)
class Survey:
    """Every installed plugin with its state, and what keeps a choice from being made."""

    rows: list[PluginRow]
    problems: list[str]


def report(
    environ: Mapping[str, str] | None = None, *, ask_trackers: bool = False
) -> list[PluginRow]:
    """List every installed plugin with its state in a script started with this environment.

    States: active, available, passed over, undecided, refused, broken, disabled.
    Only what the environment asks for is imported; with `ask_trackers` the trackers too, which
    then say whether `log_with="all"` can use them, but not their libraries.
    """
    environ = dict(os.environ if environ is None else environ)
    return survey(Situation.of(environ), ask_trackers=ask_trackers).rows


def survey(situation: Situation, *, ask_trackers: bool = False) -> Survey:
    """List every installed plugin with its state in a situation.

    A kind of which none can be chosen has its plugins undecided, with the error.
    """
    states, failed = _chosen(situation)
    disabled = disabled_names(situation.environ)
    rows = []
    for record in installed().plugins:
        state, because = states.get((record.kind, record.name), ("available", "not asked for"))
        if record.kind in failed:
            state, because = "undecided", failed[record.kind]
        if ask_trackers and record.kind == "tracker" and record.name not in disabled:
            state, because = tracker_state(record, situation.environ)
        if record.name in disabled:
            state, because = "disabled", "ACCELERATE_DISABLED_PLUGINS"
        elif record.failure is not None:
            state, because = "broken", f"{type(record.failure).__name__}: {record.failure}"
        elif state in ("available", "undecided"):
            state, because = _from_source(record, state, because)
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
    return Survey(rows, list(dict.fromkeys(failed.values())))


#: The kinds of parts, each a setting of the core of that name.
PARTS = tuple(DEFAULTS)

_States = dict[tuple[str, str], tuple[str, str]]


def _chosen(situation: Situation) -> tuple[_States, dict[str, str]]:
    """Return what became of the plugins that were looked at, and why a kind has no choice."""
    # Here, not above: the launcher imports this package, and not what resolving costs.
    from accelerate_core.config.resolve import Sources, resolve_core

    failed = {}
    if situation.problem:
        kinds = ("backend", "precision", "extension", *PARTS) if situation.launched else ()
        failed = dict.fromkeys((*kinds, "launcher"), situation.problem)
    values = resolve_core({}, Sources(situation.environ, situation.config), {})
    request = situation.request(cpu=bool(values["cpu"].value))
    states = {
        (one.record.kind, one.record.name): (one.state, one.because) for one in situation.launchers
    }
    try:
        chosen = select_backend(values["backend"].value, values["backend"].origin, request)
        for entry in chosen.considered:
            states[entry.record.kind, entry.record.name] = (entry.state, entry.because)
    except AccelerateError as error:
        failed["backend"] = str(error)
    try:
        for record, _, because in select_extensions(request):
            states["extension", record.name] = ("active", because)
    except AccelerateError as error:
        failed["extension"] = str(error)
    for kind in PARTS:
        wanted = values[kind]
        try:
            part = select_part(kind, wanted)
        except AccelerateError as error:
            failed[kind] = str(error)
            continue
        if part is not None and kind not in failed:
            states[kind, part.record.name] = ("active", part.because)
    precision = values["mixed_precision"]
    try:
        states["precision", str(precision.value)] = precision_state(precision, situation.environ)
    except AccelerateError as error:
        failed["precision"] = str(error)
    return states, failed


def precision_state(wanted: Because, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return what becomes of the precision that is asked for, without importing it.

    Raises:
        MissingPluginError: there is none of that name.
        PluginError: it is disabled, or two distributions bring it.
    """
    record = find("precision", str(wanted.value), because=wanted.origin, environ=environ)
    return _from_source(record, "active", wanted.origin)


def api_of(record: PluginRecord) -> str:
    """Return the version of the contract a plugin states, "" if that cannot be told."""
    version = getattr(record.load(), "api_version", None) if record.is_loaded else None
    if version is None:
        own = record.distribution == OWN_DISTRIBUTION
        version = API_VERSION if own else stated(record.target).api_version
    return ".".join(str(part) for part in version) if version else ""


def _from_source(record: PluginRecord, state: str, because: str) -> tuple[str, str]:
    """Tell without an import what would not work if it were asked for; else what was said."""
    if not record.is_loaded and (missing := stated(record.target).missing):
        return "broken", f"its entry point names {record.target}, but {missing}"
    api = api_of(record)
    if api and int(api.split(".")[0]) != API_VERSION[0]:
        return "refused", _other_version(api)
    return state, because


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
