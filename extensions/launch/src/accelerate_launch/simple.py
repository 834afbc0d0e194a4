"""The launcher for one process, which runs the script directly."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from accelerate_launch.plan import LaunchPlan, Target
from accelerate_launch.slurm import tasks_of_step


class SimpleLauncher:
    """Runs the target directly, without rank variables, a process group or torch in the launcher."""

    name = "simple"
    api_version = (1, 0)
    priority = 20

    def accepts(self, plan: LaunchPlan) -> bool:
        """Whether this launcher can start the plan."""
        if "RANK" in plan.environment:  # a scheduler has already started this process as a rank
            return True
        watched = plan.max_restarts > 0 or plan.log_dir or plan.tee
        return plan.num_processes == 1 and not watched

    def launch_command(self, plan: LaunchPlan) -> list[str]:
        """Return the command that starts the plan on this machine."""
        return target_command(plan.target)

    def launch_environment(self, plan: LaunchPlan) -> dict[str, str]:
        """Return rank variables for a process that trains alone next to other SLURM tasks.

        Without them the script would take its rank from SLURM and train together with the other tasks.
        """
        if "RANK" in plan.environment or tasks_of_step(os.environ) == 1:
            return {}
        return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

    def launch_function(
        self, function: Callable[..., Any], args: Sequence[Any], plan: LaunchPlan
    ) -> None:
        """Run a function in this process."""
        function(*args)


def target_command(target: Target) -> list[str]:
    """Return the command line of one process of `target`."""
    start = {
        "script": [sys.executable, target.path],
        "module": [sys.executable, "-m", target.name],
        "program": [target.name],
    }
    return [*start[target.kind], *target.arguments]
