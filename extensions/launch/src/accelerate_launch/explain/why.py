"""Explain the decision about one plugin step by step. torch is imported only if the plugin needs it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from accelerate_core.plugin import (
    AccelerateError,
    MissingPluginError,
    PluginRecord,
    Selection,
    Sources,
    did_you_mean,
    installed,
    listing,
)
from accelerate_core.plugins import catalog
from accelerate_core.plugins.discovery import without_entry_point
from accelerate_core.plugins.factory import PARTS
from accelerate_launch.explain.planned_run import PlannedRun
from accelerate_launch.explain.report import api_of, problem_of, state_of
from accelerate_launch.explain.source import stated

_ASK_FOR_IT = {
    "backend": "Accelerator(backend={name!r}), ACCELERATE_BACKEND={name}, or launch --backend {name}",
    "precision": "Accelerator(mixed_precision={name!r}), ACCELERATE_MIXED_PRECISION={name}, "
    "or launch --mixed_precision {name}",
    "tracker": "Accelerator(log_with={name!r})",
    "launcher": "accelerate-core launch --launcher {name}",
    "extension": "ACCELERATE_PLUGINS={name}",
    "command": "accelerate-core {name}",
    "device": "processes use the device that torch finds; 'accelerate-core env' shows it",
    "scheduler": "start a script directly with the scheduler, which sets the trigger's variable",
    **{
        kind: f"Accelerator({kind}={{name!r}}), ACCELERATE_{kind.upper()}={{name}}"
        for kind in PARTS
    },
}


@dataclass
class Explanation:
    """The state of one plugin, and the steps of the decision.

    `problem` says why the run can't have a plugin of this kind, "" if it can.
    """

    kind: str
    name: str
    state: str
    reason: str
    steps: list[tuple[str, str]] = field(default_factory=list)
    advice: str = ""
    problem: str = ""


def why(name: str, run: PlannedRun) -> list[Explanation]:
    """Explain the decision about every installed plugin with this name.

    Raises:
        MissingPluginError: no such plugin is installed; the text has the most similar name, or the pip
            command that installs it.
    """
    records = [record for record in installed().plugins if record.name == name]
    if not records:
        raise missing(name)
    return [_explained(record, run) for record in records]


def missing(name: str) -> MissingPluginError:
    """Return the error for a plugin that is not installed."""
    tables = catalog.NAMES.values()
    if extra := next((names[name] for names in tables if name in names), None):
        return MissingPluginError(
            f"{name!r} is not installed. Install it with: {catalog.pip_command(extra)}", name=name
        )
    names = sorted({record.name for record in installed().plugins})
    known = [*names, *(one for table in tables for one in table)]
    hint = without_entry_point(name, near=did_you_mean(name, known))
    return MissingPluginError(
        f"No plugin named {name!r} is installed. The installed plugins are {listing(names)}.{hint}",
        name=name,
    )


def _explained(record: PluginRecord, run: PlannedRun) -> Explanation:
    state, reason = state_of(record, run, ask_trackers=True)
    made = Explanation(record.kind, record.name, state, reason)
    ask = _ASK_FOR_IT.get(record.kind, "see the package that defines plugins of kind {kind!r}")
    made.advice = ask.format(name=record.name, kind=record.kind)
    made.steps += [("installed", f"{_release(record)}, entry point {record.target}")]
    api = api_of(record)
    says = f"version {api}" if api else "its source has no api_version"
    made.steps.append(("contract", stated(record.target).missing or says))
    same_name = [one for one in installed().of_kind(record.kind) if one.name == record.name]
    if twins := [one for one in same_name if one is not record]:
        others = ", ".join(map(_release, twins))
        told = f"{others} has the same name, so requesting it by name is an error"
        made.steps.append(("name", told))
        made.advice = f"pip uninstall {' '.join(one.distribution for one in twins)}"
    selection = run.selections.get(record.kind)
    if state == "disabled":
        made.steps.append(("disabled", "ACCELERATE_DISABLED_PLUGINS names it"))
        made.advice = "remove it from ACCELERATE_DISABLED_PLUGINS"
    elif selection is not None:
        made.problem = problem_of(record.kind, run)
        made.steps += _steps(made, record, run, selection)
    elif record.kind == "tracker":
        made.steps.append(("log_with='all'", reason))
    if stated(record.target).explains and state not in ("disabled", "broken", "refused"):
        try:
            told = record.load().explain_choice(Sources(run.environ, run.config))
        except AccelerateError as error:
            told = f"failed: {error}"
            made.problem = made.problem or (str(error) if state == "active" else "")
        made.steps.append(("its own choice", told))
    return made


def _release(record: PluginRecord) -> str:
    return f"{record.distribution} {record.version}"


def _steps(
    told: Explanation, record: PluginRecord, run: PlannedRun, made: Selection
) -> Iterator[tuple[str, str]]:
    """Yield the steps of the selection among plugins of this kind."""
    wanted = made.wanted
    rule = made.rule
    named = "none"
    if wanted.value is not None:
        named = f"{wanted.value!r}, {wanted.origin}"
    elif record.kind in PARTS:
        usual = (
            f"{rule.usual!r} is used if it is installed"
            if rule.usual
            else "the core does it itself"
        )
        named = f"{named}; {usual}"
    yield "requested by name", named
    if record.kind == "backend":
        yield "processes", f"{run.topology.num_processes}, {run.topology.source}"
    for name in sorted(record.triggers):
        hit = made.trigger_hits.get(name)
        yield f"trigger {name}", f"matches: {hit.reason}" if hit else "does not match"
    if not record.triggers and rule.claims:
        yield (
            "triggers",
            f"none; it is used if it is named or the config file has a section {record.name}_config",
        )
    if made.error is not None:
        yield "selection", f"failed: {made.error}"
        return
    for one in made.candidates:
        if one.record is record:
            chosen = one.state == "active" != told.state  # found broken only after it was chosen
            asked = f" (chosen by {one.reason})" if chosen else ""
            yield "decision", f"{told.state}{asked}: {told.reason}"
        elif one.state != "available":
            yield f"candidate {one.record.name}", f"{one.state}: {one.reason}"
    for one in made.active:
        if one.record is not record and not rule.several:
            yield "chosen", f"{one.record.label}: {one.reason}"
