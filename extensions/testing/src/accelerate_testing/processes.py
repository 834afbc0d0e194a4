"""Start the ranks of a distributed test with time limits, and collect what each of them reports."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

#: Folder in which each rank writes `RANK.json`.
RESULTS_VARIABLE = "ACCELERATE_TESTING_RESULTS"
#: Variable that marks every process that a command started, even if its parent has ended. Nested
#: commands add their own marks, so `clean_environment` keeps the variable.
MARK = "TESTING_RUN_OF_ACCELERATE"
#: Seconds that started processes have to end after the command has ended.
_GRACE = 2.0

#: Prefixes of variables that a test must not pass on to the processes that it starts.
_HIDDEN = (
    "ACCELERATE_",
    "TORCHELASTIC_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "SLURM_",
    "PET_",
    "MASTER_",
    "GROUP_",
    "ROLE_",
)
#: With PYTHONOPTIMIZE, the asserts of a check would have no effect.
_HIDDEN_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "JOB_COMPLETION_INDEX",
    "PYTEST_ADDOPTS",
    "PYTHONOPTIMIZE",
)


@dataclass
class CompletedRun:
    """How processes ended.

    Attributes:
        results: what each rank passed to `write_result`, None for a rank that did not call it.
        left: command lines of processes that were still running after the command had ended, and
            were then killed.
    """

    returncode: int
    stdout: str
    stderr: str
    results: list[Any] = field(default_factory=list)
    timed_out: bool = False
    seconds: float = 0.0
    left: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every rank succeeded in time."""
        return self.returncode == 0 and not self.timed_out

    @property
    def story(self) -> str:
        """The last output, for the message of a failure."""
        head = "timed out" if self.timed_out else f"ended with {self.returncode}"
        return f"{head}\n{self.stdout[-2000:]}\n{self.stderr[-6000:]}".strip()

    def checked(self) -> CompletedRun:
        """Return this run if every rank succeeded; otherwise fail with its last output."""
        assert self.ok, self.story
        return self


def clean_environment(**more: str) -> dict[str, str]:
    """Return the environment of this process without variables that a launcher or Accelerator reads."""
    kept = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(_HIDDEN) and name not in _HIDDEN_NAMES
    }
    kept.setdefault("OMP_NUM_THREADS", "1")
    return {**kept, "ACCELERATE_CONFIG_HOME": os.devnull, **more}


def run_workers(
    script: str | Path,
    nproc: int = 2,
    args: Sequence[object] = (),
    *,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
) -> CompletedRun:
    """Run a script on `nproc` ranks of this machine with torchrun, and make sure that all of them end.

    The script may call `write_result(value)`; the values of the ranks are in `results`.

    Args:
        script: a path, or `-m ` and the name of a module.
        timeout: seconds after which all ranks are killed.
        env: variables in addition to those of this process, without `ACCELERATE_*` and ranks.
    """
    target = ["--module", str(script)[3:]] if str(script).startswith("-m ") else [str(script)]
    command = [*torchrun(nproc), *target]
    with tempfile.TemporaryDirectory() as folder:
        environ = clean_environment(**{RESULTS_VARIABLE: folder, **(env or {})})
        run = run_command([*command, *map(str, args)], environ, timeout)
        run.results = read_results(folder, nproc)
    return run


def torchrun(nproc: int) -> list[str]:
    """Return the command that starts ranks on this machine, without the script."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # An agent that notices late that a rank has failed would delay each such run.
    command += ["--monitor_interval", "0.1"]
    return [*command, "--local_addr", "127.0.0.1", "--nproc_per_node", str(nproc)]


def read_results(folder: str | Path, nproc: int) -> list[Any]:
    """Return what each rank passed to `write_result`, None for a rank that did not call it."""
    paths = [Path(folder, f"{rank}.json") for rank in range(nproc)]
    return [json.loads(path.read_text("utf-8")) if path.exists() else None for path in paths]


def run_command(
    command: Sequence[str],
    environ: Mapping[str, str],
    timeout: float,
    *,
    meanwhile: Callable[[], object] = lambda: None,
) -> CompletedRun:
    """Run a command with a time limit. When this returns, every process that it started has ended.

    Args:
        meanwhile: called several times per second while the command runs; if it returns True, the
            command is ended as if its time were over.
    """
    mark = uuid.uuid4().hex
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            list(command),
            env={**environ, MARK: f"{os.environ.get(MARK, '')} {mark}".strip()},
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        began = time.monotonic()
        over = False
        try:
            while process.poll() is None and time.monotonic() < began + timeout:
                over = meanwhile() is True
                if over:
                    break
                time.sleep(0.05)
            timed_out = over or process.poll() is None
            seconds = time.monotonic() - began
        finally:
            left = _end(process, mark)
        for file in (out, err):
            file.seek(0)
        return CompletedRun(
            process.returncode, out.read(), err.read(), [], timed_out, seconds, left
        )


def write_result(value: Any) -> None:
    """Pass a value (as JSON) from a rank to the test that called `run_workers`."""
    path = Path(os.environ[RESULTS_VARIABLE], f"{os.environ.get('RANK', '0')}.json")
    path.write_text(json.dumps(value), encoding="utf-8")


def _end(process: subprocess.Popen[bytes], mark: str) -> list[str]:
    """End the agent, which ends its ranks; kill the processes that are left, and return their names."""
    ended = process.poll() is not None
    started = [] if ended else psutil.Process(process.pid).children(recursive=True)
    if not ended:
        os.killpg(os.getpgid(process.pid), signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
    until = time.monotonic() + (_GRACE if ended else 0.0)
    left = _marked(mark)
    while left and time.monotonic() < until:
        time.sleep(0.05)
        left = _marked(mark)
    told = [" ".join(one.info["cmdline"] or [one.info["name"]]) for one in left]
    for one in [*left, *started]:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    if not ended:
        process.kill()
    process.wait()
    return told if ended else []


def _marked(mark: str) -> list[psutil.Process]:
    """Return the running processes that have the mark in their environment."""
    return [
        one
        for one in psutil.process_iter(["environ", "cmdline", "name", "status"])
        if mark in (one.info["environ"] or {}).get(MARK, "")
        and one.info["status"] != psutil.STATUS_ZOMBIE
    ]


def processor_seconds(pids: Iterable[int]) -> float:
    """Return the seconds of processor time that these processes and their children have used."""
    used = 0.0
    for pid in pids:
        with suppress(psutil.Error):
            one = psutil.Process(pid)
            for each in (one, *one.children(recursive=True)):
                with suppress(psutil.Error):
                    used += sum(each.cpu_times()[:4])
    return used


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
