"""Follow what a running process prints."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import threading
import time
from dataclasses import dataclass, field

import psutil

#: Seconds that a text may take to appear.
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


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a launcher and all of its processes."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait(timeout=30)
