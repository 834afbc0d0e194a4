"""The run whose plugins are told: as `launch` would start it, or a script started here."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from accelerate_core.config.files import ConfigFile
from accelerate_core.config.lookup import Sources, resolve_core
from accelerate_core.contract.topology import Topology, read_topology
from accelerate_core.errors import AccelerateError
from accelerate_core.plugins.selection import NOTHING, RULES, Request, Selection, select
from accelerate_launch.planning import draft_plan
from accelerate_launch.start import child_environment, consider_launchers

#: Kinds of plugins that a setting names by another word.
_SETTINGS = {"precision": "mixed_precision"}


@dataclass(frozen=True)
class PlannedRun:
    """What decides which plugins a run has.

    Attributes:
        environ: what the run's processes see.
        launcher: which launcher starts it; None if that was not asked.
        problem: why none of its plugins can be chosen.
    """

    environ: Mapping[str, str]
    config: ConfigFile | None
    topology: Topology
    launcher: Selection | None = None
    problem: AccelerateError | None = None

    @functools.cached_property
    def selections(self) -> Mapping[str, Selection]:
        """What is chosen of each kind of plugins; nothing is started.

        Raises:
            ConfigurationError: a setting has a value it cannot have.
        """
        made = {} if self.launcher is None else {"launcher": self.launcher}
        if self.problem is not None:
            return {**made, **{kind: Selection(kind, error=self.problem) for kind in RULES}}
        values = resolve_core({}, Sources(self.environ, self.config), {})
        cpu = bool(values["cpu"].value)
        request = Request({}, self.environ, self.topology, self.config, cpu)
        for kind in RULES:
            made[kind] = select(kind, request, values.get(_SETTINGS.get(kind, kind), NOTHING))
        return made


def planned_run(
    environ: Mapping[str, str],
    config: ConfigFile | None = None,
    num_processes: int | None = None,
) -> PlannedRun:
    """Return the run that `launch` would make of an environment and a config file.

    Without a file and a number of processes it is that of a script started here. Its launcher is
    `launch`'s decision in any case.

    Raises:
        ConfigurationError: the variables of this process's rank are wrong.
    """
    here = read_topology(environ)
    is_rank = here.because != Topology().because
    launched = num_processes is not None or (config is not None and not is_rank)
    given = {} if num_processes is None else {"num_processes": num_processes}
    try:
        plan = draft_plan(given, environ, config)
        launcher = consider_launchers(plan)[1]
        theirs = child_environment(plan, environ)
    except AccelerateError as error:
        if num_processes is not None:
            here = Topology(0, num_processes, 0, num_processes, "as asked here")
            launched = not is_rank
        problem = error if launched else None
        return PlannedRun(environ, config, here, Selection("launcher", error=error), problem)
    if not launched:
        return PlannedRun(environ, config, here, launcher)
    topology = read_topology(theirs)
    if topology.because == Topology().because:
        origin = plan.because["num_processes"].origin
        origin = origin if num_processes is None else "as asked here"
        topology = Topology(0, plan.num_processes, 0, plan.processes_per_machine, origin)
    return PlannedRun(theirs, config, topology, launcher)
