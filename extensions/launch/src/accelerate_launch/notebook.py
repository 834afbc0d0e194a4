"""Start a function in several processes from a notebook, a script or a test."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from accelerate_core.plugin import (
    ConfigurationError,
    SourcedValue,
    did_you_mean,
    env_flag,
    find,
    listing,
)
from accelerate_launch import uncaught
from accelerate_launch.attribute_hint import add_attribute_hint
from accelerate_launch.functions import patch_environment
from accelerate_launch.plan import COUNTED, LOOPBACK, LaunchPlan, Target
from accelerate_launch.planning import asks_launchers, refuse_nesting
from accelerate_launch.starting import choose_launcher


class PrepareForLaunch:
    """A function as one rank runs it, with the settings of the launch in its environment.

    Args:
        launcher: the function to run.
        distributed_type: accepted for compatibility with Accelerate, and ignored.
        debug: accepted for compatibility with Accelerate, and ignored.
        environment: environment variables that are set while the function runs.
    """

    def __init__(
        self,
        launcher: Callable[..., Any],
        distributed_type: str = "NO",
        debug: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.launcher = launcher
        self.distributed_type = distributed_type
        self.debug = debug
        self.environment = dict(environment or {})

    def __call__(self, *args: Any) -> Any:
        """Run the function on this rank."""
        with patch_environment(**self.environment):
            try:
                return self.launcher(*args)
            except Exception as error:
                add_attribute_hint(error)
                uncaught.wait_for_culprit(error)
                raise


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = LOOPBACK,
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    start_method: str = "fork",
    launcher: str | None = None,
) -> list[Any] | None:
    """Run `function(*args)` in several processes of this machine.

    Create the Accelerator, model and data inside the function. With one process, the function runs
    in this process. Returns None, unless a launcher such as `ray` collects the function's return
    values: then it returns them in the order of ranks.

    Args:
        num_processes: processes on each machine; default: one per visible accelerator, else 1.
        mixed_precision: the default precision of Accelerators that the function creates.
        use_port, master_addr: where machine 0 listens. On a single machine, the default port is
            replaced by a free one.
        node_rank, num_nodes: this machine's number from 0, and the number of machines.
        rdzv_backend, rdzv_endpoint, rdzv_conf, rdzv_id: as in torchrun.
        max_restarts: how often all processes are restarted after one fails.
        start_method: `fork` accepts a function from a notebook cell. `spawn` starts new interpreters
            and needs a function that can be imported, but this process may already use a device.
        launcher: the plugin that starts the processes; default: torch's agent in this process, or
            a launcher that an environment variable requests and that supports functions.
        monitor_interval: seconds between two checks of the processes.
        log_line_prefix_template: how lines of their output begin, as in torchrun.

    Raises:
        ConfigurationError: a number or name is invalid, `spawn` can't import the function, the named
            launcher doesn't support functions, or machine 0 does not answer.
        RuntimeConflictError: this process already uses a device, an Accelerator or a process group,
            which a forked process can't use.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank failed; the text has
            the rank and its traceback.

    Example:
        def train(lr):
            accelerator = Accelerator()
            accelerator.print(f"{accelerator.num_processes} processes, lr {lr}")
            accelerator.end_training()

        notebook_launcher(train, (1e-3,), num_processes=2)
    """
    uncaught.install()
    if not callable(function):
        raise ConfigurationError(
            f"function must be callable, not {type(function).__name__}. Pass the function itself, and its "
            "arguments in args."
        )
    precision = str(mixed_precision).lower()
    find("precision", precision, source="argument mixed_precision")
    if not 0 <= node_rank < num_nodes:
        raise ConfigurationError(f"node_rank={node_rank} must be from 0 to {num_nodes - 1}.")
    if num_processes is None:
        visible = _visible_accelerators()
        num_processes = visible or 1
        origin = f"{visible} {COUNTED[1]}" if visible else COUNTED[0]
    else:
        origin = "notebook_launcher(num_processes=...)"
    provenance = {"num_processes": SourcedValue(num_processes, origin)}
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise ConfigurationError(
            f"args={args!r} must be a tuple of the function's arguments, such as (1,). The number of "
            "processes is a separate argument, num_processes."
        )
    if num_processes * num_nodes > 1:
        refuse_nesting(os.environ)
    plan = LaunchPlan(
        _target(function),
        num_processes=num_processes * num_nodes,
        num_machines=num_nodes,
        machine_rank=node_rank,
        main_process_ip=master_addr,
        main_process_port=int(use_port) or None,
        rdzv_backend=rdzv_backend,
        rdzv_conf=",".join(f"{key}={value}" for key, value in (rdzv_conf or {}).items()),
        rdzv_id=rdzv_id,
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
        launcher=launcher,
        environment={"ACCELERATE_MIXED_PRECISION": precision},
        contributed=asks_launchers(os.environ),
        provenance=provenance,
        rdzv_endpoint=rdzv_endpoint or None,
        log_line_prefix_template=log_line_prefix_template,
        start_method=start_method,
    )
    values, failed = _start("notebook_launcher", function, args, plan)
    if failed is not None:
        raise failed
    return values


def debug_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int = 2,
    start_method: str = "fork",
    launcher: str = "torchrun",
) -> None:
    """Run `function(*args)` in several CPU processes, to try out a distributed run on any machine.

    Args:
        start_method: `fork` or `spawn`; see `notebook_launcher`.

    Raises:
        ConfigurationError: see `notebook_launcher`.
        RuntimeConflictError: see `notebook_launcher`.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank failed; the text has
            the rank and its traceback.

    Example:
        def report():
            accelerator = Accelerator()
            print(f"rank {accelerator.process_index} of {accelerator.num_processes}")
            accelerator.end_training()

        debug_launcher(report, num_processes=2)
    """
    uncaught.install()
    refuse_nesting(os.environ)
    plan = LaunchPlan(
        _target(function),
        num_processes=num_processes,
        rdzv_id="debug",
        launcher=launcher,
        environment={"ACCELERATE_USE_CPU": "true"},
        start_method=start_method,
    )
    _, failed = _start("debug_launcher", function, args, plan)
    if failed is not None:
        raise failed


def _target(function: Callable[..., Any]) -> Target:
    return Target(getattr(function, "__qualname__", type(function).__name__), kind="function")


def _start(
    caller: str, function: Callable[..., Any], args: Sequence[Any], plan: LaunchPlan
) -> tuple[list[Any] | None, Exception | None]:
    """Let the launcher of `plan` run `function(*args)` in its processes, and wait until they end.

    Returns the function's values, if the launcher collects them, and the exception, if any, without
    this package's frames above the function. Debug mode raises it with all frames instead.
    """
    if plan.num_processes < 1:
        number = plan.processes_per_machine
        raise ConfigurationError(f"num_processes={number} must be at least 1.")
    _check_start_method(plan.start_method, function, args)
    if plan.launcher is not None:
        sourced = SourcedValue(plan.launcher, f"{caller}(launcher=...)")
        plan = replace(plan, provenance={**plan.provenance, "launcher": sourced})
    launcher: Any = choose_launcher(plan)
    prepared = PrepareForLaunch(function, environment=plan.environment)
    try:
        return launcher.launch_function(prepared, args, plan), None
    except Exception as error:
        if env_flag(os.environ, "ACCELERATE_DEBUG_MODE"):
            raise
        return None, error.with_traceback(_outside_package(error.__traceback__))


def _outside_package(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback from the first frame outside of this package."""
    here = os.path.dirname(__file__)
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(here):
        trace = trace.tb_next
    return trace


def _check_start_method(name: str, function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Check the name, and for `spawn` that the function and its arguments can be pickled."""
    known = ("fork", "spawn")
    if name not in known:
        raise ConfigurationError(
            f"start_method={name!r} is not one of {listing(known)}.{did_you_mean(name, known)}"
        )
    if name == "fork":
        return
    main = sys.modules.get("__main__")
    if getattr(function, "__module__", "") == "__main__" and not hasattr(main, "__file__"):
        raise ConfigurationError(
            f"start_method='spawn' starts new interpreters, which cannot import {function!r} because "
            "it is defined in the notebook. Put it into a module, or use start_method='fork'."
        )
    for what, value in (("function", function), ("args", tuple(args))):
        try:
            pickle.dumps(value)
        except Exception as error:  # objects may raise anything when they are pickled
            raise ConfigurationError(
                f"start_method='spawn' needs to pickle {what}, but that failed: {error}. Define "
                "everything at the top level of a module, or use start_method='fork'."
            ) from None


def _visible_accelerators() -> int:
    import torch

    # Counting does not initialize the devices, so children can still be forked.
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0
