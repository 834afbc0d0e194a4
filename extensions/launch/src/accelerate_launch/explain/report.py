"""List the installed plugins and their states in a planned run, without importing torch."""

from __future__ import annotations

from collections.abc import Mapping

from accelerate_core.plugin import API_VERSION, PluginError, PluginRecord, disabled_names, installed
from accelerate_core.plugins.discovery import OWN_DISTRIBUTION
from accelerate_launch.explain.planned_run import PlannedRun
from accelerate_launch.explain.source import stated


def rows(run: PlannedRun, *, ask_trackers: bool = False) -> list[dict[str, str]]:
    """List every installed plugin with its state in a run and the reason.

    The states are active, available, passed over, undecided, refused, broken and disabled. If no
    plugin of a kind can be chosen, all of them are undecided and the error is the reason. Only
    plugins that the run requests are imported. With `ask_trackers`, trackers are imported too, but
    not their libraries, to find out whether `log_with="all"` can use them.
    """
    made = []
    for one in installed().plugins:
        state, reason = state_of(one, run, ask_trackers=ask_trackers)
        row = {"kind": one.kind, "name": one.name, "distribution": one.distribution}
        row |= {"version": one.version, "api_version": api_of(one)}
        made.append({**row, "state": state, "reason": reason})
    return made


def problem_of(kind: str, run: PlannedRun) -> str:
    """Return why a run can't have a plugin of a kind, "" if it can."""
    selection = run.selections.get(kind)
    if selection is None:
        return ""
    if selection.error is not None:
        return str(selection.error)
    if selection.wanted.value is not None:
        for one in selection.candidates:
            if one.error is not None:
                return str(one.error)
    for one in selection.active:
        state, reason = state_of(one.record, run)
        if state in ("broken", "refused"):  # choosing a plugin doesn't import it, creating it does
            asked = f"requested by {one.reason}"
            return f"The {kind} plugin {one.record.label} ({asked}) is {state}: {reason}."
    return ""


def problems(run: PlannedRun) -> list[str]:
    """Return the problems of all kinds of plugins, each once."""
    return list(dict.fromkeys(filter(None, (problem_of(kind, run) for kind in run.selections))))


def state_of(
    record: PluginRecord, run: PlannedRun, *, ask_trackers: bool = False
) -> tuple[str, str]:
    """Return the state of a plugin in a run, and why."""
    if record.name in disabled_names(run.environ):
        return "disabled", "ACCELERATE_DISABLED_PLUGINS"
    state, reason = "available", "not requested"
    if record.kind == "tracker" and ask_trackers:
        state, reason = _tracker_state(record, run.environ)
    elif (made := run.selections.get(record.kind)) is not None:
        found = [one for one in made.candidates if one.record is record]
        if found and (made.error is None or found[0].error is not None):
            state, reason = found[0].state, found[0].reason
        elif made.error is not None:
            state = "undecided"
            reason = str(made.error)
    if record.failure is not None:
        return "broken", f"{type(record.failure).__name__}: {record.failure}"
    if state not in ("available", "undecided") and record.loaded is not None:
        return state, reason
    # Find plugins that would not work if they were requested, without importing them.
    missing = "" if record.loaded is not None else stated(record.target).missing
    if missing:
        return "broken", f"its entry point names {record.target}, but {missing}"
    api = api_of(record)
    if api and int(api.split(".")[0]) != API_VERSION[0]:
        ours = ".".join(map(str, API_VERSION))
        return "refused", f"written for contract version {api}, but this core supports {ours}"
    return state, reason


def api_of(record: PluginRecord) -> str:
    """Return the contract version that a plugin states, "" if it is unknown."""
    version = getattr(record.loaded, "api_version", None)
    if version is None:
        own = record.distribution == OWN_DISTRIBUTION
        version = API_VERSION if own else stated(record.target).api_version
    return ".".join(str(part) for part in version) if version else ""


def _tracker_state(record: PluginRecord, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the state of a tracker for `log_with="all"`, and why."""
    try:
        tracker = record.load()
    except PluginError:
        return "broken", ""
    asks = getattr(tracker, "unusable", None)
    why = asks(environ) if asks is not None else "it is not a GeneralTracker class"
    if why:
        return "passed over", why
    if getattr(tracker, "requires_logging_directory", False) is True:
        return "available", "log_with='all' uses it if a project_dir is given"
    return "available", "log_with='all' uses it"
