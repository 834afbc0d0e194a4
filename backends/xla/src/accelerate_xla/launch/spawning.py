"""Start one process per TPU of this host with `xmp.spawn`, and report the first failure.

This was only run with one process, because several need a TPU. The code is the same for both.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

from accelerate_core.plugin import (
    AccelerateError,
    ConfigurationError,
    RuntimeConflictError,
    is_failure,
    running,
)
from accelerate_launch import PrepareForLaunch
from accelerate_xla import library

#: Port of rank 0 when there are several hosts, which must all use the same one.
_PORT = 29500
#: What forked processes run. They inherit it, so it doesn't need to be picklable.
_inherited: Rank | None = None


class RankFailedError(AccelerateError, RuntimeError):
    """A process failed. The message has its rank and traceback, and `status` is its exit status.

    Cause: an exception or a signal in that rank. The other ranks were terminated because of it.
    Fix: fix the error that the traceback shows.
    """

    status = 1


class Rank:
    """What a spawned process runs: a function, with the usual variables of a rank set.

    Args:
        folder: a process that fails writes the reason into this folder.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], folder: str) -> None:
        self.function = function
        self.args = tuple(args)
        self.folder = folder

    def __call__(self, index: int) -> None:
        """Run the function. torch_xla determines the rank."""
        try:
            os.environ.update(_variables_of_rank())
            self.function(*self.args)
        except BaseException as error:
            if is_failure(error):
                self._fail(index, error)

    def _fail(self, index: int, error: BaseException) -> None:
        """Write the reason to a file and exit, so that the pool terminates the other processes."""
        code = error.code if isinstance(error, SystemExit) else 1
        text = "".join(traceback.format_exception(error))
        if isinstance(error, SystemExit):
            text = f"exit status {code}" if isinstance(code, int) else str(code)
        elif isinstance(error, ConfigurationError) and error.__traceback__ is None:
            text = str(error)
        made = {"status": code if isinstance(code, int) else 1, "text": text}
        Path(self.folder, f"{index}.json").write_text(json.dumps(made), encoding="utf-8")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _run_inherited(index: int) -> None:
    assert _inherited is not None
    _inherited(index)


def _variables_of_rank() -> dict[str, str]:
    """Return the variables that launchers set for each rank.

    Raises:
        ConfigurationError: this process has several devices.
    """
    runtime = library.imported("runtime")
    if (count := runtime.addressable_device_count()) > 1:
        raise ConfigurationError(
            f"Each process has {count} devices, as on TPU v2 and v3, where torch_xla starts a thread "
            "for each device. An Accelerator needs a process per device, or one process for all. "
            "Use one process (SPMD): pass --parallelism_config_dp_replicate_size with the number of "
            "devices."
        )
    made = {
        "RANK": runtime.global_ordinal(),
        "WORLD_SIZE": runtime.world_size(),
        "LOCAL_RANK": runtime.local_ordinal(),
        "LOCAL_WORLD_SIZE": runtime.local_process_count(),
    }
    address = os.environ.get("MASTER_ADDR") or "127.0.0.1"
    if made["WORLD_SIZE"] > made["LOCAL_WORLD_SIZE"]:
        address = runtime.get_master_ip()
    return {**{name: str(value) for name, value in made.items()}, "MASTER_ADDR": address}


def spawn(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    start_method: str = "spawn",
    num_processes: int | None = None,
) -> None:
    """Run `function(*args)` in one process per TPU of this host, and wait until all have ended.

    Args:
        num_processes: the expected number of processes, or None for any number.

    Raises:
        RuntimeConflictError: this process has used a device or has an Accelerator.
        ConfigurationError: there is no TPU, or `num_processes` does not match.
        RankFailedError: a process failed.
    """
    check_untouched()
    global _inherited
    spawning = library.imported("distributed.xla_multiprocessing")
    here, hosts = _count()
    check_number(num_processes, here, hosts)
    port = os.environ.get("MASTER_PORT") or str(_PORT if hosts > 1 else _free_port())
    more = {"MASTER_PORT": port}
    if here > 1 and not os.environ.get("OMP_NUM_THREADS"):
        more["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // here))
    start = PrepareForLaunch(partial(spawning.spawn, start_method=start_method), environment=more)
    with tempfile.TemporaryDirectory() as folder:
        rank = Rank(function, args, folder)
        _inherited = rank if start_method == "fork" else None
        try:
            start(_run_inherited if _inherited else rank)
        except BrokenProcessPool:
            raise _first_failure(Path(folder)) from None
        finally:
            _inherited = None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_untouched() -> None:
    """Check that this process can start others.

    Raises:
        RuntimeConflictError: this process has used a device or has an Accelerator.
    """
    torch_xla = sys.modules.get("torch_xla")
    again = "Restart the notebook's kernel, and launch first."
    if running() is not None:
        raise RuntimeConflictError(
            "This process already has an Accelerator (or PartialState). Create it inside the "
            f"launched function instead. {again}"
        )
    if torch_xla is not None and torch_xla._XLAC._xla_runtime_is_initialized():
        raise RuntimeConflictError(
            "This process has already used an XLA device, so processes started from it would not "
            "find all devices. Create tensors, call torch_xla.device() and query devices only "
            f"inside the launched function. {again}"
        )


def _count() -> tuple[int, int]:
    """Return the number of processes that torch_xla starts on this host, and the number of hosts."""
    if library.imported("runtime").device_type() != "TPU":
        return 1, 1
    tpu = library.imported().tpu
    here = int(tpu.num_local_processes())
    if here == 0:
        raise ConfigurationError(
            "PJRT_DEVICE is TPU, but this machine has no TPU. To try a script on the CPU, set "
            "PJRT_DEVICE=CPU."
        )
    return here, int(tpu.num_tpu_workers())


def check_number(asked: int | None, here: int, hosts: int) -> None:
    """Check the requested number of processes.

    Raises:
        ConfigurationError: it is neither the number of TPUs of this host nor of all hosts.
    """
    if asked not in (None, here, here * hosts):
        total = f", {here * hosts} on {hosts} hosts" if hosts > 1 else ""
        raise ConfigurationError(
            f"num_processes={asked}, but this host has {here} TPUs{total}, and torch_xla starts one "
            "process per TPU. Leave the number out, or set it to 1 for one process."
        )


def _first_failure(folder: Path) -> RankFailedError:
    files = sorted(folder.glob("*.json"), key=lambda one: one.stat().st_mtime_ns)
    if not files:
        return RankFailedError(
            "A process ended without an error message. It may have been killed because the machine "
            "ran out of memory, or aborted by a library. Its output is above."
        )
    failure = json.loads(files[0].read_text(encoding="utf-8"))
    error = RankFailedError(f"Rank {files[0].stem} failed first:\n{failure['text'].rstrip()}")
    error.status = failure["status"]
    return error
