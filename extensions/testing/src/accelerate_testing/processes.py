"""Start the ranks of a distributed test, with limits, and hear from each of them."""

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
#: By which everything that a command started is found, whoever its parent is by then. Commands
#: inside of commands add theirs; `clean_environment` lets it through.
MARK = "TESTING_RUN_OF_ACCELERATE"
#: Seconds in which what was started may end by itself, once the command has ended.
_GRACE = 2.0

#: What must not leak from whoever runs a test into what it starts.
_HIDDEN = (
    "ACCELERATE_",
    "TORCHELASTIC_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "SLURM_",
    "MASTER_",
    "GROUP_",
    "ROLE_",
)
#: With PYTHONOPTIMIZE a check would assert nothing.
_HIDDEN_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "PYTEST_ADDOPTS",
    "PYTHONOPTIMIZE",
)


@dataclass
class CompletedRun:
    """How processes ended, and what each rank handed to `write_result` (None: nothing).

    Attributes:
        left: the command lines of processes that were still there some time after the command had
            ended by itself, and were killed.
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
        """Whether every rank ended well and in time."""
        return self.returncode == 0 and not self.timed_out

    @property
    def story(self) -> str:
        """The end of what was printed, for the message of a failure."""
        head = "timed out" if self.timed_out else f"ended with {self.returncode}"
        return f"{head}\n{self.stdout[-2000:]}\n{self.stderr[-6000:]}".strip()

    def checked(self) -> CompletedRun:
        """Return this run if every rank ended well, else fail with the story."""
        assert self.ok, self.story
        return self


def clean_environment(**more: str) -> dict[str, str]:
    """Return this process's environment without what a launcher or an Accelerator would read."""
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
    """Run a script on `nproc` ranks of this machine, by torchrun; kill all of them in the end.

    The script may call `write_result(value)`; the ranks' values come back in `results`.

    Args:
        script: a path, or the name of a module after `-m `.
        timeout: seconds after which all ranks are killed.
        env: variables on top of this process's, whose `ACCELERATE_*` and ranks are left out.
    """
    target = ["--module", str(script)[3:]] if str(script).startswith("-m ") else [str(script)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local_addr", "127.0.0.1", "--nproc_per_node", str(nproc), *target]
    with tempfile.TemporaryDirectory() as folder:
        environ = clean_environment(**{RESULTS_VARIABLE: folder, **(env or {})})
        run = run_command([*command, *map(str, args)], environ, timeout)
        run.results = read_results(folder, nproc)
    return run


def read_results(folder: str | Path, nproc: int) -> list[Any]:
    """Return what each rank handed to `write_result`, None for a rank that wrote nothing."""
    paths = [Path(folder, f"{rank}.json") for rank in range(nproc)]
    return [json.loads(path.read_text("utf-8")) if path.exists() else None for path in paths]


def run_command(
    command: Sequence[str],
    environ: Mapping[str, str],
    timeout: float,
    *,
    meanwhile: Callable[[], object] = lambda: None,
) -> CompletedRun:
    """Run a command with a time limit; it and whatever it started is gone when this returns.

    Args:
        meanwhile: called several times per second while it runs; the run is over time as soon as
            it returns True.
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
    """Hand a value (as JSON) from a rank to the test that called `run_workers`."""
    path = Path(os.environ[RESULTS_VARIABLE], f"{os.environ.get('RANK', '0')}.json")
    path.write_text(json.dumps(value), encoding="utf-8")


def _end(process: subprocess.Popen[bytes], mark: str) -> list[str]:
    """End the agent, which ends its ranks; kill whoever is left, and tell who they were."""
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
    """Return the processes that have the mark in their environment, and still run."""
    return [
        one
        for one in psutil.process_iter(["environ", "cmdline", "name", "status"])
        if mark in (one.info["environ"] or {}).get(MARK, "")
        and one.info["status"] != psutil.STATUS_ZOMBIE
    ]


def processor_seconds(pids: Iterable[int]) -> float:
    """Return what these processes, and those they started, have used of the processor."""
    used = 0.0
    for pid in pids:
        with suppress(psutil.Error):
            one = psutil.Process(pid)
            for each in (one, *one.children(recursive=True)):
                with suppress(psutil.Error):
                    used += sum(each.cpu_times()[:4])
    return used


def free_port() -> int:
    """Return a port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
