"""Start the ranks of a distributed test, with limits, and hear from each of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Run", "clean_environment", "run_command", "run_workers", "write_result"]

#: Folder in which each rank writes `RANK.json`.
RESULTS_VARIABLE = "ACCELERATE_TESTING_RESULTS"

#: What must not leak from whoever runs a test into what it starts.
_HIDDEN = ("ACCELERATE_", "TORCHELASTIC_", "OMPI_", "PMI_", "MASTER_", "GROUP_", "ROLE_")
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass
class Run:
    """How the processes ended, and what each rank handed to `write_result` (None: nothing)."""

    returncode: int
    stdout: str
    stderr: str
    results: list[Any] = field(default_factory=list)
    timed_out: bool = False
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every rank ended well and in time."""
        return self.returncode == 0 and not self.timed_out

    @property
    def story(self) -> str:
        """The end of what was printed, for the message of a failure."""
        head = "timed out" if self.timed_out else f"ended with {self.returncode}"
        return f"{head}\n{self.stdout[-2000:]}\n{self.stderr[-6000:]}".strip()


def clean_environment(**more: str) -> dict[str, str]:
    """Return this process's environment without what a launcher or an Accelerator would read."""
    kept = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(_HIDDEN) and name not in _RANKS
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
) -> Run:
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
        run.results = [_read(Path(folder, f"{rank}.json")) for rank in range(nproc)]
    return run


def run_command(
    command: Sequence[str],
    environ: Mapping[str, str],
    timeout: float,
    *,
    meanwhile: Callable[[], None] = lambda: None,
) -> Run:
    """Run a command with a time limit; it and whatever it started is gone when this returns.

    Args:
        meanwhile: called several times per second while it runs.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            list(command), env=dict(environ), stdout=out, stderr=err, start_new_session=True
        )
        began = time.monotonic()
        until = began + timeout
        try:
            while process.poll() is None and time.monotonic() < until:
                meanwhile()
                time.sleep(0.05)
            timed_out = process.poll() is None
        finally:
            _end(process)
        meanwhile()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    seconds = time.monotonic() - began
    return Run(process.returncode, texts[0], texts[1], timed_out=timed_out, seconds=seconds)


def write_result(value: Any) -> None:
    """Hand a value (as JSON) from a rank to the test that called `run_workers`."""
    path = Path(os.environ[RESULTS_VARIABLE], f"{os.environ.get('RANK', '0')}.json")
    path.write_text(json.dumps(value), encoding="utf-8")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the agent, which ends its ranks; whoever is left after that is killed."""
    left = _descendants(process.pid)
    if process.poll() is None:
        os.killpg(os.getpgid(process.pid), signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            pass
    for pid in [*left, process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
    process.wait()


def _descendants(pid: int) -> list[int]:
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
