"""One process for each TPU of this host, by `xmp.spawn`, and what is told of one that fails.

Several processes have not been tried: that needs a TPU. One process takes the same way.
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

#: Of rank 0, where several hosts have to know it without being told.
_PORT = 29500
#: What forked processes run: they have it from this one, and nothing of it needs to be pickled.
_inherited: Rank | None = None


class RankFailedError(AccelerateError, RuntimeError):
    """A process failed; the text has its rank and traceback, `status` its exit status.

    Cause: an exception in that rank, or a signal.
    Mend: what the traceback names; the other ranks were ended because of it.
    """

    status = 1


class Rank:
    """What a spawned process runs: a function that finds the variables of ranks set.

    Args:
        folder: where a process that fails says why.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], folder: str) -> None:
        self.function = function
        self.args = tuple(args)
        self.folder = folder

    def __call__(self, index: int) -> None:
        """Run the function as the rank that torch_xla says this process is."""
        try:
            os.environ.update(_variables_of_rank())
            self.function(*self.args)
        except BaseException as error:
            if is_failure(error):
                self._fail(index, error)

    def _fail(self, index: int, error: BaseException) -> None:
        """Say why, and end at once: the pool then ends the other processes, which wait for this one."""
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
    """Return what launchers set for each rank.

    Raises:
        ConfigurationError: this process has several devices, a thread for each.
    """
    runtime = library.imported("runtime")
    if (count := runtime.addressable_device_count()) > 1:
        raise ConfigurationError(
            f"Each process has {count} devices here and torch_xla starts a thread for each, as on TPU "
            "v2 and v3; an Accelerator belongs to a process. Use one process for all devices "
            "instead (SPMD): --parallelism_config_dp_replicate_size with their number."
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
    """Run `function(*args)` in one process for each TPU of this host, and wait for their end.

    Args:
        num_processes: how many are expected; None for any number.

    Raises:
        RuntimeConflictError: this process has used a device, or has an Accelerator.
        ConfigurationError: there is no TPU, or another number of them.
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
    """Refuse to start processes from one that uses a device already.

    Raises:
        RuntimeConflictError: it does.
    """
    torch_xla = sys.modules.get("torch_xla")
    again = "Restart the notebook's kernel, and launch first."
    if running() is not None:
        raise RuntimeConflictError(
            "This process already has an Accelerator (or PartialState). Make it inside the "
            f"function that is launched. {again}"
        )
    if torch_xla is not None and torch_xla._XLAC._xla_runtime_is_initialized():
        raise RuntimeConflictError(
            "This process has already used an XLA device, so that the processes it starts would each "
            "see one device and fail to find the others. Keep tensors on it, torch_xla.device() and "
            f"questions about devices inside the function that is launched. {again}"
        )


def _count() -> tuple[int, int]:
    """Return how many processes torch_xla will start on this host, and how many hosts there are."""
    if library.imported("runtime").device_type() != "TPU":
        return 1, 1
    tpu = library.imported().tpu
    here = int(tpu.num_local_processes())
    if here == 0:
        raise ConfigurationError(
            "PJRT_DEVICE is TPU, and this machine has none. To try a script on its CPU set "
            "PJRT_DEVICE=CPU."
        )
    return here, int(tpu.num_tpu_workers())


def check_number(asked: int | None, here: int, hosts: int) -> None:
    """Refuse a number of processes that is neither that of this host nor of all hosts.

    Raises:
        ConfigurationError: it is neither.
    """
    if asked not in (None, here, here * hosts):
        total = f", {here * hosts} on {hosts} hosts" if hosts > 1 else ""
        raise ConfigurationError(
            f"num_processes={asked}, and this host has {here} TPUs{total}: torch_xla starts a "
            "process for each. Leave the number out, or give 1 for one process."
        )


def _first_failure(folder: Path) -> RankFailedError:
    files = sorted(folder.glob("*.json"), key=lambda one: one.stat().st_mtime_ns)
    if not files:
        return RankFailedError(
            "A process ended without a word: killed, as by a system that is out of memory, or "
            "aborted by a library. What it printed stands above."
        )
    said = json.loads(files[0].read_text(encoding="utf-8"))
    made = RankFailedError(f"Rank {files[0].stem} failed first:\n{said['text'].rstrip()}")
    made.status = said["status"]
    return made
