"""Run a function on a Ray cluster, for `notebook_launcher(..., launcher="ray")`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from ray import cloudpickle

from accelerate_core.plugin import origin_of
from accelerate_launch import LaunchPlan
from accelerate_launch.failures import describe_function
from accelerate_launch.plan import DEFAULT_PORT
from accelerate_ray.options import RunOptions, processes_of
from accelerate_ray.run import Outcome, run
from accelerate_ray.settings import RaySettings


def run_function(
    function: Callable[..., Any], args: Sequence[Any], plan: LaunchPlan, settings: RaySettings
) -> list[Any]:
    """Run `function(*args)` in the ranks of `plan`, and return their values in the order of ranks.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank failed, or its node
            died.
    """
    parts = (sys.path, cloudpickle.dumps(function), cloudpickle.dumps(tuple(args)))
    options = RunOptions(
        settings,
        processes_of(plan),
        environment=plan.environment,
        address_source=origin_of(settings, "address"),
        files={"function": cloudpickle.dumps(parts)},
        max_restarts=plan.max_restarts,
        # The default of `notebook_launcher` means a free port.
        port=None if plan.main_process_port == DEFAULT_PORT else plan.main_process_port,
        prefix=plan.log_line_prefix_template or "[rank ${rank}] ",
    )
    command = ["{python}", "-m", "accelerate_ray.function_rank", "{folder}"]
    outcome = run(options, lambda cluster: command)
    if not outcome.ok:
        raise _error(function, outcome)
    return outcome.values


def _error(function: Callable[..., Any], outcome: Outcome) -> Exception:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Ranks without a message were stopped because another one failed.
    told = {rank: one for rank, one in outcome.failures.items() if one.message}
    failures: Any = told or outcome.failures
    inner = getattr(function, "launcher", function)
    error = ChildFailedError.__new__(ChildFailedError)  # its constructor lists torch's own fields
    error.name = getattr(inner, "__name__", "function")
    error.failures = failures
    text = outcome.explain(quiet=False)[0] if outcome.lost else describe_function(failures)
    error.args = (text.strip(),)
    return error
