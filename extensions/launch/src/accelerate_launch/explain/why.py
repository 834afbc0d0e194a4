"""The whole decision about one plugin, told step by step; no torch unless the plugin needs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate_core.config.provenance import Because
from accelerate_core.config.resolve import Sources, resolve_core
from accelerate_core.errors import AccelerateError, MissingPluginError, did_you_mean, listing
from accelerate_core.plugins import catalog
from accelerate_core.plugins.discovery import (
    PluginRecord,
    disabled_names,
    installed,
    without_entry_point,
)
from accelerate_core.plugins.parts import DEFAULTS, select_part
from accelerate_core.plugins.selection import (
    Considered,
    Request,
    fired_triggers,
    select_backend,
    select_extensions,
)
from accelerate_launch.explain.report import (
    PARTS,
    PluginRow,
    api_of,
    precision_state,
    survey,
    tracker_state,
)
from accelerate_launch.explain.situation import Situation
from accelerate_launch.explain.static import stated

__all__ = ["Decision", "why"]

_ASK_FOR_IT = {
    "backend": "Accelerator(backend={name!r}), ACCELERATE_BACKEND={name}, or launch --backend {name}",
    "precision": "Accelerator(mixed_precision={name!r}), ACCELERATE_MIXED_PRECISION={name}, "
    "or launch --mixed_precision {name}",
    "tracker": "Accelerator(log_with={name!r})",
    "launcher": "accelerate-core launch --launcher {name}",
    "extension": "ACCELERATE_PLUGINS={name}",
    "command": "accelerate-core {name}",
    **{
        kind: f"Accelerator({kind}={{name!r}}), ACCELERATE_{kind.upper()}={{name}}"
        for kind in PARTS
    },
}


@dataclass
class Decision:
    """What becomes of one plugin, and each step on the way there.

    `problem` is what keeps the choice of its kind from being made; "" if it can be.
    """

    kind: str
    name: str
    state: str
    because: str
    steps: list[tuple[str, str]] = field(default_factory=list)
    advice: str = ""
    problem: str = ""

    def undecided(self, step: str, problem: str) -> None:
        """Take down that nothing of this kind can be chosen, as the table does."""
        self.state, self.because, self.problem = "undecided", problem, problem
        self.steps.append((step, f"it fails: {problem}"))

    def as_dict(self) -> dict[str, Any]:
        """Return the decision as JSON knows it."""
        return dataclasses.asdict(self)


def why(name: str, situation: Situation) -> list[Decision]:
    """Tell the decision about every installed plugin of that name.

    Args:
        situation: under what is decided: `Situation.of` a script's environment, or the
            `outlook` of a launch.

    Raises:
        MissingPluginError: there is none of that name; with the nearest, or the pip command.
    """
    records = [record for record in installed().plugins if record.name == name]
    if not records:
        raise _missing(name)
    values = resolve_core({}, Sources(situation.environ, situation.config), {})
    return [_decide(record, situation, values) for record in records]


def _missing(name: str) -> MissingPluginError:
    kinds = ("backend", "precision", "tracker")
    extras = [extra for kind in kinds if (extra := catalog.extra_for(kind, name))]
    if extras:
        return MissingPluginError(
            f"{name!r} is not installed. Install it with: {catalog.pip_command(extras[0])}",
            name=name,
        )
    names = sorted({record.name for record in installed().plugins})
    known = [*names, *(one for kind in kinds for one in catalog.known_names(kind))]
    hint = without_entry_point(name, near=did_you_mean(name, known))
    return MissingPluginError(
        f"No plugin named {name!r} is installed. There are {listing(names)}.{hint}", name=name
    )


def _decide(record: PluginRecord, situation: Situation, values: Mapping[str, Because]) -> Decision:
    request = situation.request(cpu=bool(values["cpu"].value))
    steps = [("installed", _installed(record)), ("contract", _contract(record))]
    twins = [
        one
        for one in installed().of_kind(record.kind)
        if one.name == record.name and one is not record
    ]
    decision = Decision(record.kind, record.name, "available", "not asked for", steps)
    decision.advice = _ASK_FOR_IT[record.kind].format(name=record.name)
    if twins:
        others = ", ".join(f"{one.distribution} {one.version}" for one in twins)
        steps.append(("name", f"also claimed by {others}: asked for by name it is refused"))
        decision.advice = f"pip uninstall {' '.join(one.distribution for one in twins)}"
    if record.name in disabled_names(request.environ):
        decision.state, decision.because = "disabled", "ACCELERATE_DISABLED_PLUGINS"
        steps.append(("kept out", "ACCELERATE_DISABLED_PLUGINS names it"))
        decision.advice = "take it out of ACCELERATE_DISABLED_PLUGINS"
        return decision
    tell = {"backend": _backend, "precision": _precision, "extension": _extension}
    if situation.problem and (
        record.kind == "launcher" or (situation.launched and record.kind in tell)
    ):
        decision.undecided("launch", situation.problem)
    elif record.kind in tell:
        tell[record.kind](decision, record, request, values)
    elif record.kind in PARTS:
        _part(decision, record, values[record.kind])
    elif record.kind == "tracker":
        decision.state, decision.because = tracker_state(record, request.environ)
        steps.append(("log_with='all'", decision.because))
    elif record.kind == "launcher":
        _launcher(decision, record, situation)
    # What its source or its import tells is known whether or not anything can be chosen.
    row = _row(record, situation)
    if decision.state in ("available", "undecided") and row.state in ("broken", "refused"):
        decision.state, decision.because = row.state, row.because
    return decision


def _row(record: PluginRecord, situation: Situation) -> PluginRow:
    """Return what the table says of it: there is a row for each record, in the same order."""
    rows = zip(installed().plugins, survey(situation).rows, strict=True)
    return next(row for one, row in rows if one is record)


def _installed(record: PluginRecord) -> str:
    return f"{record.distribution} {record.version}, entry point {record.target}"


def _contract(record: PluginRecord) -> str:
    said = stated(record.target)
    if said.missing:
        return said.missing
    api = api_of(record)
    return f"version {api}" if api else "its source states no api_version"


def _backend(
    decision: Decision, record: PluginRecord, request: Request, values: Mapping[str, Because]
) -> None:
    steps, wanted = decision.steps, values["backend"]
    if wanted.value is None:
        steps.append(("asked for by name", "no backend is named"))
    else:
        steps.append(("asked for by name", f"{wanted.value!r}, {wanted.origin}"))
    steps.append(("processes", f"{request.topology.num_processes}, {request.topology.because}"))
    steps += _triggers(record, request)
    try:
        chosen = select_backend(wanted.value, wanted.origin, request)
    except AccelerateError as error:
        decision.undecided("selection", str(error))
        return
    for entry in chosen.considered:
        if entry.record is record:
            decision.state, decision.because = entry.state, entry.because
    steps += [("claim", _claim(one)) for one in chosen.considered if one.record is record]
    steps += [
        (f"against {one.record.name}", f"{one.state}: {one.because}")
        for one in chosen.considered
        if one.record is not record and one.state != "available"
    ]
    if chosen.record is not record:
        steps.append(("chosen", f"{chosen.record.label}, because of {chosen.because}"))


def _claim(entry: Considered) -> str:
    return f"{entry.state}: {entry.because}"


def _triggers(record: PluginRecord, request: Request) -> list[tuple[str, str]]:
    if not record.triggers:
        return [("triggers", "it has none: it is used only where it is named")]
    fired = fired_triggers(request)
    return [
        (f"trigger {name}", f"fires: {fired[name]}" if name in fired else "does not fire")
        for name in sorted(record.triggers)
    ]


def _precision(
    decision: Decision, record: PluginRecord, request: Request, values: Mapping[str, Because]
) -> None:
    wanted = values["mixed_precision"]
    decision.steps.append(("mixed_precision", f"{wanted.value!r}, {wanted.origin}"))
    try:
        said = precision_state(wanted, request.environ)
    except AccelerateError as error:
        decision.undecided("selection", str(error))
        return
    if wanted.value == record.name:
        decision.state, decision.because = said


def _part(decision: Decision, record: PluginRecord, wanted: Because) -> None:
    usual = DEFAULTS[record.kind]
    decision.steps.append(
        (record.kind, f"{wanted.value!r}, {wanted.origin}")
        if wanted.value is not None
        else (
            record.kind,
            f"none is named: {f'{usual!r} is taken where it is installed' if usual else 'the core does it'}",
        )
    )
    try:
        part = select_part(record.kind, wanted)
    except AccelerateError as error:
        decision.undecided("selection", str(error))
        return
    if part is not None and part.record is record:
        decision.state, decision.because = "active", part.because
    elif part is not None:
        decision.steps.append(("chosen", f"{part.record.label}, because of {part.because}"))


def _launcher(decision: Decision, record: PluginRecord, situation: Situation) -> None:
    """Tell what `launch` would do; without an outlook on one, only how it decides."""
    steps = decision.steps
    if not situation.launchers:
        steps.append(("named", "launch decides: --launcher, or the first that accepts the plan"))
    for trigger in sorted(record.triggers):
        said = situation.environ.get(trigger)
        steps.append((f"trigger {trigger}", f"is {said!r}" if said else "is not set"))
    for one in situation.launchers:
        if one.record is record:
            decision.state, decision.because = one.state, one.because
        elif one.state == "active":
            steps.append(("chosen", f"{one.record.label}, because of {one.because}"))


def _extension(
    decision: Decision, record: PluginRecord, request: Request, values: Mapping[str, Because]
) -> None:
    named = request.environ.get("ACCELERATE_PLUGINS", "")
    decision.steps.append(("ACCELERATE_PLUGINS", repr(named) if named else "is not set"))
    decision.steps += _triggers(record, request)
    try:
        chosen = select_extensions(request)
    except AccelerateError as error:
        decision.undecided("selection", str(error))
        return
    for one, _, because in chosen:
        if one is record:
            decision.state, decision.because = "active", because
            decision.steps.append(("claim", because))
