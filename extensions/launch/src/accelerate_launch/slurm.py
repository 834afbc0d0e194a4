"""Read SLURM's variables, and start a run on all nodes of an allocation with srun."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from accelerate_core.plugin import ConfigurationError
from accelerate_launch.plan import LaunchPlan
from accelerate_launch.torchrun import TorchrunLauncher

_PART = re.compile(r"([^\[,]+)(?:\[([^\]]*)\])?([^,\[\]]*)(?:,|$)")

_NUMBER = re.compile(r"[0-9]{1,18}")

#: More nodes than any cluster has.
MOST_NODES = 100_000

#: SLURM uses step numbers from here on for the batch script, interactive shells and `extern`.
_RESERVED_STEP = 4294967280


class SrunLauncher:
    """Starts torch's agent on every node of the allocation with a single `srun`."""

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
        # With c10d the agents number themselves, so all nodes can run the same command.
        provenance = {name: one for name, one in plan.provenance.items() if name != "machine_rank"}
        agent = replace(
            plan, launcher=None, rdzv_backend="c10d", local_addr=None, provenance=provenance
        )
        # An elastic run continues when an agent is lost with its node.
        lost = "--no-kill" if plan.min_machines is not None else "--kill-on-bad-exit"
        return [*srun, lost, *TorchrunLauncher().launch_command(agent)]

    def launch_environment(self, plan: LaunchPlan) -> dict[str, str]:
        """Return the variables of torch's agent, which `srun` passes on."""
        return TorchrunLauncher().launch_environment(plan)


def in_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process as a task, rather than SLURM as a batch script."""
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < _RESERVED_STEP and "SLURM_PROCID" in environ


def tasks_of_step(environ: Mapping[str, str]) -> int:
    """Return the number of tasks that srun started together with this process; 1 outside a step."""
    text = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or "1"
    return int(text) if in_step(environ) and text.isdigit() else 1


def port_of_run(job: str, run: int) -> int:
    """Return a port that is the same on all nodes and rarely the same for two runs.

    Args:
        run: tells apart the runs of one job, which can overlap: the number of the step, or a process ID.
    """
    digits = re.sub(r"\D", "", job) or "0"
    return 20000 + (int(digits) + 1009 * run) % 20000


def expand_counts(text: str) -> list[int]:
    """Return the numbers in a SLURM list of counts per node: `2(x2),1` is 2, 2, 1.

    Raises:
        ConfigurationError: the text is not a valid list.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part.strip(), re.ASCII)
        if found is None:
            raise ConfigurationError(f"{text!r} is not a valid SLURM list of tasks per node.")
        repeats = int(found[2] or 1)
        _refuse_more_nodes(len(counts) + repeats, text)
        counts += [int(found[1])] * repeats
    return counts


def _refuse_more_nodes(count: int, text: str) -> None:
    if count > MOST_NODES:
        raise ConfigurationError(
            f"The SLURM list {text!r:.200} has more than {MOST_NODES} nodes, so it cannot be right."
        )


def expand_nodes(text: str) -> list[str]:
    """Return the names in a SLURM node list: `gpu[01-03,7],login` has five.

    Raises:
        ConfigurationError: the text is not a valid node list.
    """
    names: list[str] = []
    text = text.strip()
    position = 0
    while position < len(text):
        found = _PART.match(text, position)
        if found is None:
            raise ConfigurationError(f"{text!r} is not a valid SLURM node list.")
        before, ranges, after = found.groups()
        if ranges is None:
            names.append(before + after)
        else:
            numbers = _numbers(ranges, text, MOST_NODES - len(names))
            names += [f"{before}{number}{after}" for number in numbers]
        _refuse_more_nodes(len(names), text)
        position = found.end()
    return names


def _numbers(ranges: str, text: str, most: int) -> list[str]:
    made: list[str] = []
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        if not _NUMBER.fullmatch(low) or (high and not _NUMBER.fullmatch(high)):
            raise ConfigurationError(
                f"{text!r} is not a valid SLURM node list: {part!r} is neither a number nor a range "
                "such as 1-4."
            )
        numbers = range(int(low), int(high or low) + 1)
        if len(made) + len(numbers) > most:
            _refuse_more_nodes(MOST_NODES + 1, text)
        made += [str(number).zfill(len(low)) for number in numbers]
    return made
