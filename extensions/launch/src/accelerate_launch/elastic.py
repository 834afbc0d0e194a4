"""What changes in a run that was started again with another number of processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
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
#: Restarts of an elastic launch, if `--max_restarts` is not set.
_RESTARTS = 100


def elastic_environment(plan: LaunchPlan) -> dict[str, str]:
    """Return the full size of an elastic launch, which the processes compare with their own."""
    if plan.min_machines is None:
        return {}
    return {POLICY: plan.elastic_policy, PROCESSES: str(plan.num_processes)}


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
        if steps * full % now:
            fitting = [count for count in range(1, full + 1) if steps * full % count == 0]
            raise ConfigurationError(
                f"The global batch of gradient_accumulation_steps={steps} on {full} processes has "
                f"{steps * full} micro-batches, which can't be divided among {now} processes. It can "
                f"be on {', '.join(map(str, fitting))}. Choose other accumulation steps, or set "
                "--elastic_policy scale."
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
