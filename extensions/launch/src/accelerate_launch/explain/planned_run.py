"""Select the plugins of a run that `launch`, or a script started directly, would begin here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from accelerate_core.contract.capabilities import lacking
from accelerate_core.plugin import (
    AccelerateError,
    ConfigFile,
    ConfigurationError,
    PluginVersionError,
    Request,
    Selection,
    SourcedValue,
    Sources,
    Topology,
    TorchDynamoPlugin,
    read_topology,
    resolve_core,
    select,
)
from accelerate_core.plugins.discovery import OWN_DISTRIBUTION
from accelerate_core.plugins.selection import NOTHING, RULES
from accelerate_launch.planning import draft_plan
from accelerate_launch.starting import child_environment, consider_launchers

#: Kinds of plugins whose setting has another name.
_SETTINGS = {"precision": "mixed_precision"}


@dataclass(frozen=True)
class PlannedRun:
    """The inputs for the choice of plugins in a run, and the selection for each kind.

    Attributes:
        environ: the environment of the run's processes.
        config: the config file that the run reads.
    """

    environ: Mapping[str, str]
    topology: Topology
    selections: Mapping[str, Selection]
    config: ConfigFile | None = None


def planned_run(
    environ: Mapping[str, str],
    config: ConfigFile | None = None,
    num_processes: int | None = None,
) -> PlannedRun:
    """Return the run that `launch` would start with an environment and a config file.

    Without a file and a number of processes, it is the run of a script that is started directly. The
    launcher is the one that `launch` would choose in either case. Nothing is started.

    Raises:
        ConfigurationError: a rank variable of this process or a setting is invalid.
    """
    topology = read_topology(environ)
    alone = Topology().source
    is_rank = topology.source != alone
    launched = num_processes is not None or (config is not None and not is_rank)
    given = {} if num_processes is None else {"num_processes": num_processes}
    try:
        plan = draft_plan(given, environ, config)
        made = {"launcher": consider_launchers(plan)[1]}
        theirs = child_environment(plan, environ)
    except AccelerateError as error:
        made = {"launcher": Selection("launcher", error=error)}
        if num_processes is not None:
            topology = Topology(0, num_processes, 0, num_processes, "as asked here")
        if launched and not is_rank:
            made |= {kind: Selection(kind, error=error) for kind in RULES}
            return PlannedRun(environ, topology, made, config)
    else:
        if launched:
            environ = theirs
            topology = read_topology(theirs)
        if launched and topology.source == alone:
            asked = num_processes is not None
            origin = "as asked here" if asked else plan.provenance["num_processes"].origin
            topology = Topology(0, plan.num_processes, 0, plan.processes_per_machine, origin)
    values = resolve_core({}, Sources(environ, config), {})
    request = Request({}, environ, topology, config, bool(values["cpu"].value))
    for kind in RULES:
        made[kind] = select(kind, request, values.get(_SETTINGS.get(kind, kind), NOTHING))
        if made[kind].wanted.value is not None:
            _import_named(made[kind])
    _refuse_misfit(made["backend"], made["precision"], values)
    return PlannedRun(environ, topology, made, config)


def _import_named(made: Selection) -> None:
    """Import plugins that are named explicitly, to find errors that selection does not show."""
    for one in made.active:
        if one.record.distribution == OWN_DISTRIBUTION:
            continue
        try:
            one.record.load_checked()
        except AccelerateError as error:
            one.state = "refused" if isinstance(error, PluginVersionError) else "broken"
            one.reason = str(error)
            one.error = error


def _refuse_misfit(
    backend: Selection, precision: Selection, values: Mapping[str, SourcedValue]
) -> None:
    """Mark a named precision as refused if a run would refuse it with this backend."""
    if precision.wanted.value is None or not (backend.active and precision.active):
        return
    if backend.record.distribution == OWN_DISTRIBUTION:
        return  # the core's own backend accepts every precision
    supports = getattr(backend.plugin, "supports", {})
    one = precision.active[0]
    found = one.record.load()
    if lacking(supports, one.record.name, getattr(found, "needs", ())):
        from accelerate_core.accelerator.compatibility import check_supported  # imports torch

        try:
            check_supported(
                backend.plugin, backend.record, found, values, TorchDynamoPlugin(), None
            )
        except ConfigurationError as error:
            one.state = "refused"
            one.reason = str(error)
            one.error = error
