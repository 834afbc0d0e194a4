"""The launcher that starts a lighthouse and several replicas. It does not import torch."""

from __future__ import annotations

import sys
from dataclasses import replace

from accelerate_core.plugin import ConfigurationError
from accelerate_launch import LaunchPlan, choose_launcher, target_command
from accelerate_torchft.settings import TorchFTKwargs

#: The backends of this package.
BACKENDS = ("torchft", "torchft_fsdp2")
#: Restarts of each replica, if `--max_restarts` is not set.
_RESTARTS = 100


class TorchFTLauncher:
    """Starts a lighthouse and several replicas, and starts a replica again when it dies."""

    name = "torchft"
    api_version = (1, 0)
    Settings = TorchFTKwargs

    def __init__(self, settings: TorchFTKwargs) -> None:
        self.settings = settings

    def accepts(self, plan: LaunchPlan) -> bool:
        """Whether the launch uses one of the torchft backends, or names this launcher."""
        backend = plan.provenance.get("backend")
        return plan.target.kind != "function" and (
            plan.launcher == self.name or (backend is not None and backend.value in BACKENDS)
        )

    def launch_command(self, plan: LaunchPlan) -> list[str]:
        """Return the command that starts the lighthouse and the replicas.

        Raises:
            ConfigurationError: the processes can't be divided among the replicas, or the plan has
                several machines.
        """
        given = self.settings
        size = self._processes_per_replica(plan)
        restarts = plan.provenance.get("max_restarts")
        asked = restarts is not None and restarts.origin != "default"
        command = [sys.executable, "-m", "accelerate_torchft.supervisor"]
        command += ["--replicas", str(given.replicas), "--first", str(given.first_replica)]
        command += ["--max_restarts", str(plan.max_restarts if asked else _RESTARTS)]
        command += ["--min_replicas", str(given.min_replicas)]
        command += ["--join_timeout", str(given.join_timeout)]
        command += ["--heartbeat_timeout", str(given.heartbeat_timeout)]
        command += ["--grace", str(given.timeout)]
        if given.lighthouse:
            command += ["--lighthouse", given.lighthouse]
        if plan.quiet:
            command.append("--quiet")
        inner = target_command(plan.target)
        if size > 1:
            others = {key: one for key, one in plan.provenance.items() if key != "launcher"}
            replica = replace(
                plan,
                num_processes=size,
                max_restarts=0,
                main_process_port=None,
                launcher="torchrun",
                provenance=others,
            )
            inner = choose_launcher(replica).launch_command(replica)
        return [*command, "--", *inner]

    def world_size(self, plan: LaunchPlan) -> int:
        """Return the number of processes of each replica."""
        return self._processes_per_replica(plan)

    def _processes_per_replica(self, plan: LaunchPlan) -> int:
        replicas = self.settings.replicas
        if plan.num_machines > 1:
            raise ConfigurationError(
                f"num_machines={plan.num_machines} cannot be used with torchft. Start one launch per "
                "machine, each with the address of the same lighthouse (--torchft_lighthouse), its own "
                "--torchft_first_replica, and --torchft_total_replicas."
            )
        asked = plan.asked_processes
        if asked is None and plan.num_processes == 1:
            return 1
        if plan.num_processes % replicas:
            raise ConfigurationError(
                f"num_processes={plan.num_processes} ({plan.provenance['num_processes'].origin}) is not "
                f"divisible by torchft_replicas={replicas}. Each replica has the same number of "
                "processes."
            )
        return plan.num_processes // replicas
