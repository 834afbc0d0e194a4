"""SLURM: what an allocation says about machines and ranks, and starting on all of its nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from accelerate_core.errors import ConfigurationError
from accelerate_launch.plan import LaunchPlan
from accelerate_launch.torchrun import TorchrunLauncher

_PART = re.compile(r"([^\[,]+)(?:\[([^\]]*)\])?([^,\[\]]*)(?:,|$)")

#: Steps above are SLURM's own: of the batch script, of an interactive shell, of `extern`.
_RESERVED_STEP = 4294967280


class SrunLauncher:
    """Starts one of torch's agents on every node of the allocation, by one `srun`."""

    name = "srun"
    api_version = (1, 0)
    priority = 30

    def accepts(self, plan: LaunchPlan) -> bool:
        """Whether this launcher can start the plan."""
        return plan.launcher == self.name

    def launch_command(self, plan: LaunchPlan) -> list[str]:
        """Return the command that starts the plan on all nodes."""
        nodes = str(plan.num_machines)
        srun = ["srun", "--nodes", nodes, "--ntasks", nodes, "--ntasks-per-node", "1"]
        # The agents find out among themselves who they are, so all nodes run one command.
        provenance = {name: one for name, one in plan.provenance.items() if name != "machine_rank"}
        agent = replace(
            plan, launcher=None, rdzv_backend="c10d", local_addr=None, provenance=provenance
        )
        return [*srun, "--kill-on-bad-exit", *TorchrunLauncher().launch_command(agent)]


def in_step(environ: Mapping[str, str]) -> bool:
    """Tell whether srun started this process, once per task; a batch script is started once."""
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < _RESERVED_STEP and "SLURM_PROCID" in environ


def port_of_job(job: str) -> int:
    """Return a port that all nodes of a job agree on and that two jobs hardly share."""
    digits = re.sub(r"\D", "", job) or "0"
    return 20000 + int(digits) % 20000


def expand_nodes(text: str) -> list[str]:
    """Return the names in a node list of SLURM: `gpu[01-03,7],login` is five names.

    Raises:
        ConfigurationError: it is no node list.
    """
    names: list[str] = []
    rest = text.strip()
    while rest:
        found = _PART.match(rest)
        if found is None:
            raise ConfigurationError(f"{text!r} is no node list of SLURM.")
        before, ranges, after = found.groups()
        if ranges is None:
            names.append(before + after)
        else:
            names += [f"{before}{number}{after}" for number in _numbers(ranges, text)]
        rest = rest[found.end() :]
    return names


def _numbers(ranges: str, text: str) -> list[str]:
    made = []
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        if not low.isdigit() or (high and not high.isdigit()):
            raise ConfigurationError(f"{text!r} is no node list of SLURM: {part!r} is no range.")
        numbers = range(int(low), int(high or low) + 1)
        made += [str(number).zfill(len(low)) for number in numbers]
    return made
