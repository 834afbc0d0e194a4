"""Start `stuck.py` and read what the run prints until a report is complete."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from support import clean_environment

SCRIPT = Path(__file__).with_name("stuck.py")
#: Seconds after which these runs report a hang.
HANG_AFTER = 3.0
_LIMIT = 150


@dataclass
class Run:
    """A running launch."""

    process: subprocess.Popen[str]
    lines: queue.Queue[str] = field(default_factory=queue.Queue)
    seen: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)

    def until(self, text: str, quiet: float = 1.0) -> str:
        """Return the output from the line that contains `text` until nothing is printed for a while."""
        found: list[str] = []
        limit = time.monotonic() + _LIMIT
        while time.monotonic() < limit:
            try:
                line = self.lines.get(timeout=quiet)
            except queue.Empty:
                if found or self.process.poll() is not None:
                    break
                continue
            self.seen.append(line)
            if found or text in line:
                found.append(line)
        assert found, f"no {text!r} in:\n{''.join(self.seen)}"
        return "".join(found)


@contextlib.contextmanager
def started(how: str, ranks: int, prefix: tuple[str, ...] = (), **environ: str) -> Iterator[Run]:
    """Launch the script on this many ranks, and kill what is left of it at the end."""
    words = ["launch", "--cpu", "--num_processes", str(ranks), str(SCRIPT), how]
    environ = {
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_WATCH_HANG_AFTER": str(HANG_AFTER),
        **environ,
    }
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", "accelerate_core.cli", *words],
        env=clean_environment(**environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield Run(process)
    finally:
        kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a launcher and all of its processes."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait(timeout=30)
