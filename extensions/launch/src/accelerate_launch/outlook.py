"""What `launch` would make of an environment and a config file, told without starting anything."""

from __future__ import annotations

from collections.abc import Mapping

from accelerate_core.config.files import ConfigFile
from accelerate_core.contract.topology import Topology, read_topology
from accelerate_core.errors import AccelerateError
from accelerate_launch.explain.situation import Situation
from accelerate_launch.resolve import draft_plan
from accelerate_launch.start import child_environment, consider_launchers

__all__ = ["outlook"]


def outlook(
    environ: Mapping[str, str],
    config: ConfigFile | None = None,
    num_processes: int | None = None,
) -> Situation:
    """Return under what a run's plugins would be chosen.

    With a config file, or a number of processes, it is the run `launch` would start; without,
    that of a script started here. What becomes of launchers is `launch`'s decision in any case.

    Raises:
        ConfigurationError: the variables of this process's rank are wrong.
    """
    here = read_topology(environ)
    is_rank = here.because != Topology().because
    launched = num_processes is not None or (config is not None and not is_rank)
    given = {} if num_processes is None else {"num_processes": num_processes}
    try:
        plan = draft_plan(given, environ, config)
        launchers = tuple(consider_launchers(plan)[1])
        theirs = child_environment(plan, environ)
    except AccelerateError as error:
        if num_processes is None:
            return Situation(environ, config, here, (), str(error), launched)
        topology = Topology(0, num_processes, 0, num_processes, "as asked here")
        return Situation(environ, config, topology, (), str(error), not is_rank)
    if not launched:
        return Situation(environ, config, here, launchers)
    topology = read_topology(theirs)
    if topology.because == Topology().because:
        origin = plan.because["num_processes"].origin
        origin = origin if num_processes is None else "as asked here"
        topology = Topology(0, plan.num_processes, 0, plan.processes_per_machine, origin)
    return Situation(theirs, config, topology, launchers, launched=True)
