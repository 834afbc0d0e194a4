"""Starts the ranks of distributed runs for tests, and collects their results."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import tempfile
import termios
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pool
import pytest

from accelerate_testing import CompletedRun, processes
from accelerate_testing.processes import RESULTS_VARIABLE, read_results

__all__ = [
    "RESULTS_VARIABLE",
    "case_names",
    "check_case",
    "clean_environment",
    "collect_warnings",
    "on_terminal",
    "run_workers",
]

TESTS = Path(__file__).parent


def clean_environment(**more: str) -> dict[str, str]:
    """Return the environment of this process without variables that a launcher reads.

    Unlike the function of `accelerate_testing`, this does not set the number of threads, and puts this
    folder on the import path.
    """
    kept = processes.clean_environment()
    del kept["OMP_NUM_THREADS"]
    paths = [str(TESTS), kept.get("PYTHONPATH", "")]
    kept["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return {**kept, **more}


def run_workers(
    script: str | Path,
    nproc: int,
    args: tuple[object, ...] | list[object] = (),
    *,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    launched: bool = False,
    more: Sequence[str] = (),
) -> CompletedRun:
    """Run a script on `nproc` ranks. All of them are killed after `timeout` seconds.

    If the script calls `worker.write_result(value)`, the result has the values of all ranks.

    Args:
        launched: start new interpreters with torchrun instead of forking from the pool (see `pool`).
        more: modules that the pool imports before it forks the ranks.
    """
    if launched:
        environ = clean_environment(**(env or {}))
        return processes.run_workers(script, nproc, args, timeout=timeout, env=environ)
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile("w+", encoding="utf-8") as out,
        tempfile.TemporaryFile("w+", encoding="utf-8") as err,
    ):
        environ = clean_environment(**{RESULTS_VARIABLE: folder, **(env or {})})
        command = [str(script), *map(str, args)]
        returncode, timed_out = _by_pool(command, nproc, environ, timeout, out, err, more)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
        results = read_results(folder, nproc)
    return CompletedRun(returncode, *texts, results, timed_out)


def _by_pool(
    script: list[str], nproc: int, environ: dict[str, str], timeout: float, out: IO[str],
    err: IO[str], more: Sequence[str],
) -> tuple[int, bool]:  # fmt: skip
    """Run the ranks as torchrun does. If one rank fails, the others are ended too."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {**environ, "TORCHELASTIC_RUN_ID": str(uuid.uuid4())}
    ranks = [
        pool.start(
            script,
            {**environ, **_rank(rank, nproc, store.port, environ)},
            out,
            err,
            rank,
            more=more,
        )
        for rank in range(nproc)
    ]
    until = time.monotonic() + timeout
    try:
        while (ended := {one.poll() for one in ranks}) == {None} or ended == {None, 0}:
            if time.monotonic() > until:
                return 1, True
            ranks[0].wait(0.02)
            time.sleep(0.005)
    finally:
        for one in ranks:
            one.send(signal.SIGTERM)
        until = time.monotonic() + 5
        while None in {one.poll() for one in ranks} and time.monotonic() < until:
            time.sleep(0.005)
        for one in ranks:
            one.send(signal.SIGKILL)
            one.wait(5)
    return int(ended != {0}), False


def _rank(rank: int, nproc: int, port: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun adds to the environment of a rank."""
    threads = {} if nproc == 1 or "OMP_NUM_THREADS" in environ else {"OMP_NUM_THREADS": "1"}
    this = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
    size = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(nproc))
    return (
        threads
        | this
        | size
        | {
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            "TORCHELASTIC_ERROR_FILE": f"{environ[RESULTS_VARIABLE]}/error.{rank}",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        }
    )


def case_names(script: Path) -> list[str]:
    """Return the names of the cases in a worker, without importing it."""
    return re.findall(r"^@case[^\n]*\n(?:@[^\n]*\n)*def (\w+)", script.read_text(), re.MULTILINE)


def check_case(run: CompletedRun, name: str) -> None:
    """Fail with the traceback of each rank on which the case failed."""
    results = {
        rank: (done or {}).get(name, "not run: see the failures before it")
        for rank, done in enumerate(run.results)
    }
    failed = [f"rank {rank}: {text}" for rank, text in results.items() if text]
    if failed:
        lost = "" if any(run.results) else run.story
        pytest.fail("\n".join([*failed, lost]), pytrace=False)


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Collect the warnings in the block, as strings such as "UserWarning: the message"."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [f"{one.category.__name__}: {one.message}" for one in caught]


def on_terminal(
    command: Sequence[str], folder: Path, environ: Mapping[str, str], columns: int = 80
) -> str:
    """Run a command in a pseudo-terminal, and return its output."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = subprocess.Popen(
        command, stdin=its, stdout=its, stderr=its, cwd=folder, env=dict(environ)
    )
    os.close(its)
    output = b""
    try:
        while got := os.read(ours, 65536):
            output += got
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait(timeout=60) == 0, output.decode()
    return output.decode()
