"""Start a function in several processes from a notebook, a script or a test."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate_core.errors import (
    ConfigurationError,
    RuntimeConflictError,
    did_you_mean,
    listing,
)
from accelerate_launch.torchrun import DEFAULT_PORT, LOOPBACK

__all__ = ["PrepareForLaunch", "debug_launcher", "notebook_launcher"]

#: Tells a child that it was forked by us; the peer's name for the same thing.
FORK_VARIABLE = "FORK_LAUNCHED"

#: What torch's agent writes into the environment when it starts.
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


class PrepareForLaunch:
    """A function as one rank runs it: with the launch's settings in its environment.

    Args:
        launcher: the function to run.
        distributed_type: kept for those who construct this class themselves; not read.
        debug: kept likewise.
        environment: variables that stand while the function runs.
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
        from accelerate_core.distributed.failures import wait_for_culprit

        with patch_environment(**self.environment):
            try:
                return self.launcher(*args)
            except Exception as error:
                wait_for_culprit(error)
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
) -> None:
    """Run `function(*args)` in several processes of this machine.

    The function must itself make its Accelerator, model and data. With one process it runs right
    here.

    Args:
        num_processes: processes on each machine; default: one per visible accelerator, else 1.
        mixed_precision: the default precision of Accelerators made in the function.
        use_port, master_addr: where machine 0 listens. On a single machine the
            default port gives way to a free one.
        node_rank, num_nodes: this machine's number, and how many there are.
        rdzv_backend, rdzv_endpoint, rdzv_conf, rdzv_id: as in torchrun.
        max_restarts: how often all processes are started anew after one fails.
        start_method: `fork`, which takes a function of a notebook's cell; or `spawn`, which starts
            fresh interpreters, takes a function that can be imported, and does not mind what this
            process has used.

    Raises:
        ConfigurationError: a number or name is not possible, or `spawn` cannot find the function.
        RuntimeConflictError: this process uses a device, an Accelerator or a process
            group already, which forked processes could not use.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank
            failed; the text has the rank and its traceback.
    """
    from accelerate_core.plugins.discovery import find

    if not callable(function):
        raise ConfigurationError(f"function must be callable, not {type(function).__name__}.")
    find("precision", str(mixed_precision).lower(), because="argument mixed_precision")
    if not 0 <= node_rank < num_nodes:
        raise ConfigurationError(f"node_rank={node_rank} must be from 0 to {num_nodes - 1}.")
    if num_processes is None:
        num_processes = _visible_accelerators() or 1
    if num_processes < 1:
        raise ConfigurationError(f"num_processes={num_processes} must be at least 1.")
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise ConfigurationError(
            f"notebook_launcher(function, args={args!r}): args are the function's arguments, as a "
            "tuple such as (1,); the number of processes is num_processes."
        )
    environment = {"ACCELERATE_MIXED_PRECISION": str(mixed_precision).lower()}
    _check_start_method(start_method, function, args)
    if num_processes * num_nodes == 1:
        PrepareForLaunch(function, environment=environment)(*args)
        return
    _check_launchable("notebook_launcher", start_method)
    port = _free_port_unless(int(use_port), num_nodes)
    _run_elastic(
        PrepareForLaunch(function, environment={**environment, FORK_VARIABLE: "1"}),
        args,
        start_method,
        nproc_per_node=num_processes,
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        run_id=rdzv_id,
        rdzv_backend=rdzv_backend,
        rdzv_endpoint=rdzv_endpoint or f"{master_addr}:{port}",
        rdzv_configs=_with_rank(rdzv_conf, rdzv_backend, node_rank),
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
        log_line_prefix_template=log_line_prefix_template,
        local_addr=LOOPBACK if num_nodes == 1 else None,
    )


def debug_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int = 2,
    start_method: str = "fork",
) -> None:
    """Run `function(*args)` in several CPU processes, to try a distributed run anywhere.

    Raises:
        ConfigurationError: see `notebook_launcher`.
        RuntimeConflictError: see `notebook_launcher`.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank
            failed; the text has the rank and its traceback.
    """
    if num_processes < 1:
        raise ConfigurationError(f"num_processes={num_processes} must be at least 1.")
    _check_start_method(start_method, function, args)
    _check_launchable("debug_launcher", start_method)
    environment = {"ACCELERATE_USE_CPU": "true", FORK_VARIABLE: "1"}
    _run_elastic(
        PrepareForLaunch(function, debug=True, environment=environment),
        args,
        start_method,
        nproc_per_node=num_processes,
        min_nodes=1,
        max_nodes=1,
        run_id="debug",
        rdzv_backend="static",
        rdzv_endpoint=f"{LOOPBACK}:{_free_port()}",
        rdzv_configs={"rank": 0},
        max_restarts=0,
        local_addr=LOOPBACK,
    )


class _Rank:
    """What a child runs; an object and not a closure, so that it can be sent to a fresh one."""

    def __init__(self, prepared: PrepareForLaunch) -> None:
        self.prepared = prepared
        # torch names the function in its messages.
        self.__name__ = self.__qualname__ = getattr(prepared.launcher, "__name__", "function")

    def __call__(self, *arguments: Any) -> None:
        import torch

        # The parent's OpenMP threads did not come along: a forked child that waits for
        # them would hang in its first large operation.
        torch.set_num_threads(1)
        self.prepared(*arguments)


def _run_elastic(
    prepared: PrepareForLaunch, args: Sequence[Any], start_method: str, **config: Any
) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with patch_environment(TORCHELASTIC_SIGNALS_TO_HANDLE=_SIGNALS), _signal_handlers_kept():
        made = LaunchConfig(start_method=start_method, **config)
        elastic_launch(made, _Rank(prepared))(*args)


def _check_start_method(name: str, function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Check the name, and for `spawn` that function and arguments can be sent to a fresh process."""
    known = ("fork", "spawn")
    if name not in known:
        raise ConfigurationError(
            f"start_method={name!r} is not one of {listing(known)}.{did_you_mean(name, known)}"
        )
    if name == "fork":
        return
    import pickle

    main = sys.modules.get("__main__")
    if getattr(function, "__module__", "") == "__main__" and not hasattr(main, "__file__"):
        raise ConfigurationError(
            f"start_method='spawn' starts fresh interpreters, which cannot find {function!r}: it "
            "is defined in the notebook. Put it into a module and import it, or use "
            "start_method='fork'."
        )
    for what, value in (("function", function), ("args", tuple(args))):
        try:
            pickle.dumps(value)
        except Exception as error:  # what is pickled may raise anything
            raise ConfigurationError(
                f"start_method='spawn' sends the {what} to fresh interpreters, and it cannot be "
                f"pickled: {error}. Define it at the top of a module, or use start_method='fork'."
            ) from None


def _check_launchable(caller: str, start_method: str) -> None:
    """Raise RuntimeConflictError for what the processes could not use.

    The rank variables of an outer launch count: each rank would start a world of its own.
    """
    from accelerate_core.distributed.process import running
    from accelerate_launch.resolve import refuse_nesting

    refuse_nesting(os.environ)
    if start_method == "spawn":
        return
    again = f"Restart the notebook's kernel and call {caller} first."
    if os.name == "nt":
        raise RuntimeConflictError(
            f"{caller} forks processes, which Windows cannot do: use start_method='spawn'."
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
                f"This process has already used the {accelerator.type} device, and a forked one "
                "cannot use it again. Keep models, tensors and device queries inside the function "
                f"that is launched. {again} Or give it a function of a module and "
                "start_method='spawn'."
            )
    if running() is not None:
        raise RuntimeConflictError(
            f"This process already has an Accelerator (or PartialState). Make it inside the "
            f"function that is launched; end this one with accelerator.end_training(). Or: {again}"
        )
    if dist.is_available() and dist.is_initialized():
        raise RuntimeConflictError(
            "This process is already in a torch.distributed process group; end it with "
            f"torch.distributed.destroy_process_group() before calling {caller}."
        )


def _visible_accelerators() -> int:
    import torch

    # Counting does not touch the devices, so that children can still be forked.
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _with_rank(conf: dict[str, Any] | None, backend: str, node_rank: int) -> dict[str, Any]:
    made = dict(conf or {})
    if backend == "static":
        made.setdefault("rank", node_rank)
    return made


def _free_port_unless(port: int, num_nodes: int) -> int:
    """Return `port`; on one machine the default port is replaced by a free one."""
    return _free_port() if num_nodes == 1 and port in (0, DEFAULT_PORT) else port


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Put back the handlers that torch's agent replaces and leaves replaced."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
    before = {number: signal.getsignal(number) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def patch_environment(**kwargs: object) -> Iterator[None]:
    """Set variables (names in capitals) for the length of the block, then restore them.

    Example:
        >>> with patch_environment(omp_num_threads=1):
        ...     subprocess.run(command)
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
