"""What changes in a run that was started again with another number of processes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate_core.plugin import (
    AcceleratorView,
    Claim,
    ConfigurationError,
    PreparePlanView,
    Request,
    hookimpl,
)
from accelerate_launch.plan import LaunchPlan

#: The policy, and the number of processes of the whole run; set by `launch --num_machines MIN:MAX`.
POLICY = "ACCELERATE_ELASTIC_POLICY"
PROCESSES = "ACCELERATE_ELASTIC_PROCESSES"
#: The range of machines, MIN:MAX.
MACHINES = "ACCELERATE_ELASTIC_MACHINES"
#: Set in processes that were started again, which don't repeat the warnings of the first ones.
RESTARTED = "ACCELERATE_ELASTIC_RESTARTED"
#: Restarts of an elastic launch, if `--max_restarts` is not set.
_RESTARTS = 100
#: A warning lists at most this many numbers of processes.
_LISTED = 8


def elastic_environment(plan: LaunchPlan) -> dict[str, str]:
    """Return the full size of an elastic launch, which the processes compare with their own."""
    if plan.min_machines is None:
        return {}
    return {
        POLICY: plan.elastic_policy,
        PROCESSES: str(plan.num_processes),
        MACHINES: f"{plan.min_machines}:{plan.num_machines}",
    }


def restarts_of(plan: LaunchPlan) -> int:
    """Return the number of restarts. An elastic launch needs one for each machine that it loses."""
    asked = plan.provenance.get("max_restarts")
    default = asked is None or asked.origin == "default"
    return _RESTARTS if plan.min_machines is not None and default else plan.max_restarts


@dataclass(frozen=True)
class Size:
    """The size of an elastic run.

    Attributes:
        policy: `keep_global_batch` or `scale`.
        full: the number of processes if no machine is missing.
        now: the number of processes.
        factor: the size of the global batch, relative to the one of `full` processes.
    """

    policy: str
    full: int
    now: int
    factor: float


class Elastic:
    """Keeps the global batch when machines join or leave an elastic launch."""

    name = "elastic"
    api_version = (1, 0)
    size: Size | None = None

    @classmethod
    def detect(cls, request: Request) -> Claim | None:
        """Claim the runs that `launch --num_machines MIN:MAX` starts."""
        text = request.environ.get(POLICY)
        return Claim(10, f"environment variable {POLICY}={text}") if text else None

    @hookimpl
    def on_start(self, accelerator: AcceleratorView) -> None:
        """Adjust the accumulation steps to the number of processes.

        Raises:
            ConfigurationError: the global batch can't be divided among the processes, or the backend
                accumulates by itself.
        """
        policy = os.environ[POLICY]
        full, now = int(os.environ[PROCESSES]), accelerator.num_processes
        if policy != "keep_global_batch":
            self.size = Size(policy, full, now, now / full)
            return
        if "accumulation" in accelerator.backend.owns:
            raise ConfigurationError(
                f"elastic_policy=keep_global_batch changes the accumulation steps, but the backend "
                f"{accelerator.backend.name!r} reads them before the processes start. Set "
                "--elastic_policy scale."
            )
        steps = accelerator.gradient_accumulation_steps
        machines = os.environ.get(MACHINES, "")
        sizes = [*_sizes(machines, full), now]
        advice = (
            f"set gradient_accumulation_steps to a multiple of {_smallest_steps(full, sizes)}, or set "
            "--elastic_policy scale."
        )
        if not _can_divide(steps * full, now):
            fitting = [count for count in range(1, full + 1) if _can_divide(steps * full, count)]
            raise ConfigurationError(
                f"The global batch of gradient_accumulation_steps={steps} on {full} processes has "
                f"{steps * full} micro-batches, which can't be divided among {now} processes. It can "
                f"be on {', '.join(map(str, fitting))}. To continue, {advice}"
            )
        impossible = [size for size in sizes if not _can_divide(steps * full, size)]
        if impossible and RESTARTED not in os.environ:
            accelerator.warn_once(
                f"This run ends with an error if machines leave or join and {_listed(impossible)} "
                f"processes are left: its global batch of {steps * full} micro-batches "
                f"(gradient_accumulation_steps={steps} on {full} processes) can't be divided among "
                f"them. To continue with any number of machines in --num_machines {machines}, {advice}"
            )
        whole: Any = accelerator
        whole.gradient_accumulation_steps = steps * full // now
        self.size = Size(policy, full, now, 1.0)

    @hookimpl
    def prepare_objects(self, accelerator: AcceleratorView, plan: PreparePlanView) -> None:
        """Refuse schedulers whose speed depends on the number of processes.

        Raises:
            ConfigurationError: schedulers move one step per process.
        """
        kept = self.size is not None and self.size.policy == "keep_global_batch"
        follows = accelerator.step_scheduler_with_optimizer and not accelerator.split_batches
        if (
            kept
            and follows
            and accelerator.scheduler_steps == "per_process"
            and plan.values("scheduler")
        ):
            raise ConfigurationError(
                "scheduler_steps='per_process' moves a scheduler by the number of processes, which "
                "changes in an elastic launch. Set scheduler_steps='per_step'."
            )

    @hookimpl
    def state_attributes(self, accelerator: AcceleratorView) -> Mapping[str, object]:
        """Provide `accelerator.elastic`, the size of the run."""
        return {"elastic": self.size}

    @hookimpl
    def explain(self, accelerator: AcceleratorView) -> str | None:
        """Return the size, and the accumulation steps that follow from it."""
        if self.size is None:
            return None
        steps = accelerator.gradient_accumulation_steps
        return (
            f"elastic: {self.size.now} of {self.size.full} processes, policy {self.size.policy}; "
            f"{steps} accumulation steps, global batch {self.size.factor:g} of the full one"
        )


def _sizes(machines: str, full: int) -> list[int]:
    """Return the numbers of processes on each number of machines in MIN:MAX; empty if unknown."""
    if not machines:
        return []
    least, most = map(int, machines.split(":"))
    return [full // most * count for count in range(least, most + 1)]


def _can_divide(micro_batches: int, processes: int) -> bool:
    """Return whether all processes take the same number of micro-batches of a global batch."""
    return micro_batches % processes == 0


def _smallest_steps(full: int, sizes: Sequence[int]) -> int:
    """Return the fewest accumulation steps on `full` processes that can be divided among all sizes."""
    return math.lcm(full, *sizes) // full


def _listed(numbers: Sequence[int]) -> str:
    """Return numbers as text: "1, 2 or 3"."""
    texts = [str(number) for number in numbers[:_LISTED]]
    if len(numbers) > _LISTED:
        texts.append(f"{len(numbers) - _LISTED} other numbers of")
    return " or ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))
