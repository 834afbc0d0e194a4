"""Run a function in several processes, with torch's elastic agent in this process."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate_core.plugin import RuntimeConflictError, env_flag
from accelerate_launch.devices import get_free_port
from accelerate_launch.failures import describe_function
from accelerate_launch.machine_0 import MachineZero, find_machine_0, split_endpoint
from accelerate_launch.plan import DEFAULT_PORT, LOOPBACK, LaunchPlan

#: Set in processes that this package forked. Accelerate uses the same name.
FORK_VARIABLE = "FORK_LAUNCHED"

#: The signals that torch's agent handles, as it sets them in the environment.
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


def run_elastic(function: Callable[..., Any], args: Sequence[Any], plan: LaunchPlan) -> None:
    """Run `function(*args)` in the processes of `plan` on this machine, and wait until they end.

    Raises:
        ConfigurationError: the address of machine 0 does not resolve, or nothing answers there.
        RuntimeConflictError: this process uses a device, an Accelerator or a process group, which a
            forked process can't use.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank failed.
    """
    if plan.start_method == "fork":
        _check_forkable()
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    alone = plan.num_machines == 1
    conf: dict[str, Any] = dict(pair.split("=", 1) for pair in plan.rdzv_conf.split(",") if pair)
    if plan.rdzv_backend == "static":
        conf.setdefault("rank", plan.machine_rank)
    port = plan.main_process_port or DEFAULT_PORT
    if alone and port == DEFAULT_PORT:
        port = get_free_port()
    endpoint = plan.rdzv_endpoint or f"{plan.main_process_ip or LOOPBACK}:{port}"
    if not alone:
        _find_machine_0(plan, endpoint, conf)
    with patch_environment(TORCHELASTIC_SIGNALS_TO_HANDLE=_SIGNALS), _signal_handlers_kept():
        made = LaunchConfig(
            start_method=plan.start_method,
            nproc_per_node=plan.processes_per_machine,
            min_nodes=plan.num_machines,
            max_nodes=plan.num_machines,
            run_id=plan.rdzv_id or "none",
            rdzv_backend=plan.rdzv_backend,
            rdzv_endpoint=endpoint,
            rdzv_configs=conf,
            max_restarts=plan.max_restarts,
            monitor_interval=plan.monitor_interval,
            log_line_prefix_template=plan.log_line_prefix_template,
            local_addr=LOOPBACK if alone else plan.local_addr,
        )
        try:
            with _short_logs(plan.max_restarts):
                elastic_launch(made, _Rank(function))(*args)
        except ChildFailedError as error:
            if env_flag(os.environ, "ACCELERATE_DEBUG_MODE"):
                raise
            error.args = (describe_function(error.failures),)
            # torch's frames are dropped: the text already has the function's traceback.
            raise error.with_traceback(None) from None


def _find_machine_0(plan: LaunchPlan, endpoint: str, conf: Mapping[str, Any]) -> None:
    host, port = split_endpoint(endpoint)
    given = "rdzv_endpoint" if plan.rdzv_endpoint else "master_addr and use_port"
    source = f"{given} of notebook_launcher"
    is_machine_0 = plan.machine_rank == 0 if plan.rdzv_backend == "static" else None
    machine = MachineZero(host, port, source, plan.rdzv_backend, conf)
    find_machine_0(machine, is_machine_0=is_machine_0)


class _Rank:
    """The function that a child process runs. It is an object so that it can be pickled."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        # torch names the function in its messages.
        inner = getattr(function, "launcher", function)
        self.__name__ = self.__qualname__ = getattr(inner, "__name__", "function")

    def __call__(self, *arguments: Any) -> None:
        import torch

        # A forked child doesn't have the parent's OpenMP threads, and would wait for them forever in
        # its first large operation.
        torch.set_num_threads(1)
        with patch_environment(**{FORK_VARIABLE: "1"}):
            self.function(*arguments)


def _check_forkable() -> None:
    """Raise RuntimeConflictError if this process uses something that a forked process can't use."""
    from accelerate_core.plugin import running

    again = "restart the notebook's kernel and launch before anything else."
    if os.name == "nt":
        raise RuntimeConflictError(
            "start_method='fork' is not available on Windows. Use start_method='spawn'."
        )
    if "torch" not in sys.modules:
        return
    import torch
    import torch.distributed as dist

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        if getattr(module, "is_initialized", lambda: False)():
            raise RuntimeConflictError(
                f"This process has already used the {accelerator.type} device, so forked processes "
                "cannot use it. Keep models, tensors and device queries inside the launched function "
                f"and {again} Or pass a function from a module and start_method='spawn'."
            )
    if running() is not None:
        raise RuntimeConflictError(
            "This process already has an Accelerator (or PartialState). Create it inside the launched "
            f"function instead, and end this one with accelerator.end_training(), or {again}"
        )
    if dist.is_available() and dist.is_initialized():
        raise RuntimeConflictError(
            "This process is already in a torch.distributed process group. Call "
            "torch.distributed.destroy_process_group() before launching."
        )


class _ShortLogs(logging.Filter):
    """Shortens torch's log records about failed ranks, whose traceback is shown at the end anyway."""

    def __init__(self, restarts: int) -> None:
        super().__init__()
        self.restarts = restarts

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep one line per failure if the ranks are restarted, otherwise none."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            last = str(error).rstrip().splitlines()[-1:]
            record.msg = ": ".join([record.getMessage(), *last])
            record.args = None
            record.exc_info = None
        return self.restarts > 0


@contextmanager
def _short_logs(restarts: int) -> Iterator[None]:
    """Shorten torch's logs of failing ranks, unless debug mode is on."""
    shown = env_flag(os.environ, "ACCELERATE_DEBUG_MODE")
    names = (
        ()
        if shown
        else ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn")
    )
    short = _ShortLogs(restarts)
    for name in names:
        logging.getLogger(name).addFilter(short)
    try:
        yield
    finally:
        for name in names:
            logging.getLogger(name).removeFilter(short)


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restore the signal handlers that torch's agent replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # Windows lacks the last two
    signals = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def patch_environment(**kwargs: object) -> Iterator[None]:
    """Set environment variables, with upper-cased names, inside the block and restore them after it.

    Example:
        import subprocess

        with patch_environment(omp_num_threads=1):
            subprocess.run("echo threads: $OMP_NUM_THREADS", shell=True, check=True)
    """
    values = {key.upper(): str(value) for key, value in kwargs.items()}
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
