"""The plugin that starts ranks on a Ray cluster. It does not import Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate_core.plugin import ConfigurationError, origin_of
from accelerate_launch import LaunchPlan
from accelerate_launch.elastic import elastic_environment, restarts_of
from accelerate_ray.options import processes_of
from accelerate_ray.settings import RaySettings, parse_resources, parse_runtime_env

_SET_BY_RAY = ("PYTHONBREAKPOINT", "RAY_AUTH_MODE", "RAY_CLIENT_MODE")
_THREADS = "OMP_NUM_THREADS"
#: Options of `launch` that contradict what Ray decides, with the reason.
_CONTRADICTS = {
    "num_machines": "Ray chooses the nodes: set --num_processes and --ray_strategy",
    "machine_rank": "Ray numbers the nodes, and one command starts all ranks",
    "main_process_ip": "ranks connect to the node on which Ray places rank 0",
    "gpu_ids": "Ray assigns the GPUs: set --ray_gpus",
    "rdzv_conf": "ranks connect to rank 0 directly, without a rendezvous",
}


class RayLauncher:
    """Starts one actor per rank in a placement group of a Ray cluster."""

    name = "ray"
    api_version = (1, 0)
    Settings = RaySettings

    def __init__(self, settings: RaySettings) -> None:
        self.settings = settings

    def accepts(self, plan: LaunchPlan) -> bool:
        """Whether this launcher can start the plan. It is only asked if a setting requests it."""
        return plan.launcher == self.name or "ACCELERATE_USE_RAY" in plan.contributed

    def launch_command(self, plan: LaunchPlan) -> list[str]:
        """Return the command that connects to the cluster and starts the ranks.

        Raises:
            ConfigurationError: the plan sets something that Ray decides, or a setting is invalid.
        """
        self._check(plan)
        command = [sys.executable, "-m", "accelerate_ray.driver"]
        command += ["--num_processes", str(processes_of(plan) or "auto")]
        command += ["--max_restarts", str(restarts_of(plan))]
        if plan.min_machines is not None:
            share = plan.num_processes // plan.num_machines
            command += ["--least", str(share * plan.min_machines), "--share", str(share)]
        for name, value in vars(self.settings).items():
            if not name.startswith("_") and value not in (None, ""):
                command += [f"--{name}", str(value)]
        if self.settings.address is not None:
            command += ["--address_source", origin_of(self.settings, "address")]
        for name in ("main_process_port", "log_dir", "tee", "role"):
            value = getattr(plan, name)
            if value is not None:
                command += [f"--{name}", str(value)]
        if plan.quiet:
            command.append("--quiet")
        target = plan.target
        return [*command, "--kind", target.kind, "--", target.path, *target.arguments]

    def launch_environment(self, plan: LaunchPlan) -> dict[str, str]:
        """Return the number of CPU threads, and the full size of an elastic launch.

        The threads follow from the reserved CPUs of a rank. The plan has an equal share of the cores of
        this machine, but the ranks run on others.
        """
        environ = elastic_environment(plan)
        threads = plan.provenance.get(_THREADS)
        if threads is not None and threads.origin.startswith("cores shared"):
            environ[_THREADS] = str(max(1, int(self.settings.cpus)))
        return environ

    def launch_function(
        self, function: Callable[..., Any], args: Sequence[Any], plan: LaunchPlan
    ) -> list[Any]:
        """Run `function(*args)` in every rank, and return what it returned, in the order of ranks.

        Raises:
            ConfigurationError: a setting is invalid, or no cluster was found.
            torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank failed, or its
                node died.
        """
        self._check(plan)
        with _variables_kept():
            from accelerate_ray.functions import run_function

            return run_function(function, args, plan, self.settings)

    def _check(self, plan: LaunchPlan) -> None:
        if plan.min_machines is not None:
            self._check_elastic(plan)
        for name, reason in _CONTRADICTS.items():
            if name == "num_machines" and plan.min_machines is not None:
                continue
            sourced = plan.provenance.get(name)
            value = None if sourced is None else sourced.value
            if value and sourced is not None and not _detected(sourced.origin):
                raise ConfigurationError(f"{name}={sourced} has no effect with Ray: {reason}.")
        if plan.num_machines > 1 and plan.target.kind == "function":
            raise ConfigurationError(
                f"num_nodes={plan.num_machines} has no effect with Ray: {_CONTRADICTS['num_machines']}."
            )
        if plan.tee is not None and plan.tee not in ("0", "1", "2", "3"):
            raise ConfigurationError(f"tee={plan.tee} is not supported with Ray. Use 0, 1, 2 or 3.")
        parse_resources(self.settings.resources)
        parse_runtime_env(self.settings.runtime_env)

    def _check_elastic(self, plan: LaunchPlan) -> None:
        if processes_of(plan) is None:
            raise ConfigurationError(
                f"A range of machines with Ray needs --num_processes, the number of processes on all "
                f"{plan.num_machines} machines."
            )
        if self.settings.strategy == "strict_pack":
            raise ConfigurationError(
                "ray_strategy=strict_pack places all ranks on one node, so none is left if it dies. "
                "Use another strategy, or leave out the range of machines."
            )


@contextmanager
def _variables_kept() -> Iterator[None]:
    """Restore the variables that Ray sets when it is imported and when it connects."""
    before = {name: os.environ.get(name) for name in _SET_BY_RAY}
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text


def _detected(origin: str) -> bool:
    """Return whether a value comes from a default or a scheduler rather than from the user."""
    return origin == "default" or origin.startswith("SLURM")
