"""The actor of one rank: it starts the rank's process on its node, and reports what happens to it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from accelerate_launch.devices import interface_of

#: Variables with which Ray limits a process to the accelerators of its actor.
VISIBLE_DEVICES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ONEAPI_DEVICE_SELECTOR",
    "ZE_AFFINITY_MASK",
    "ASCEND_RT_VISIBLE_DEVICES",
    "HABANA_VISIBLE_MODULES",
    "NEURON_RT_VISIBLE_CORES",
    "TPU_VISIBLE_CHIPS",
)
#: Seconds in which output is collected before it is sent.
_BATCH = 0.05
#: After the rank has ended, its children may keep its output open for this many seconds.
_LINGER = 1.0
#: Seconds between two updates of a progress bar.
_PROGRESS = 1.0


@dataclass(frozen=True)
class Place:
    """Where an actor runs."""

    node: str
    host: str
    address: str
    directory: str
    devices: Mapping[str, str]


@dataclass(frozen=True)
class Ending:
    """How a rank ended.

    Attributes:
        status: its exit status, or minus the number of the signal that killed it.
        error: the file in which it recorded its exception; empty if it did not.
        stacks: the stacks of its threads, if a signal killed it.
    """

    status: int
    pid: int
    when: float
    error: str = ""
    stacks: str = ""


@dataclass(frozen=True)
class News:
    """Output since the last call as pairs of stream and line, and how the rank ended if it has."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    ending: Ending | None = None


class RankActor:
    """Starts and watches the process of one rank. Ray calls its methods from several threads."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="accelerate-ray-"))
        self._address = ""
        self._lines: deque[tuple[str, str]] = deque()
        self._changed = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: Ending | None = None

    def place(self) -> Place:
        """Return where this actor runs, and which accelerators it has."""
        import ray

        context = ray.get_runtime_context()
        devices = {name: os.environ[name] for name in VISIBLE_DEVICES if os.environ.get(name)}
        self._address = ray.util.get_node_ip_address()
        host = socket.gethostname()
        return Place(context.get_node_id(), host, self._address, os.getcwd(), devices)

    def free_port(self) -> int:
        """Return a port that is free on this node at the moment of the call."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: str,
        files: Mapping[str, bytes],
    ) -> None:
        """Start the rank.

        Args:
            command: its command line. "{python}" is replaced by this node's interpreter, and
                "{folder}" by the folder of `files`.
            environment: variables that are added to those of this node.
            files: contents by name.
        """
        for name, content in files.items():
            (self._folder / name).write_bytes(content)
        words = {"{python}": sys.executable, "{folder}": str(self._folder)}
        made = [words.get(word, word) for word in command]
        own = {
            "TORCHELASTIC_ERROR_FILE": str(self._folder / "error.json"),
            # The rank leaves its traceback to the launcher, which shows each one once.
            "ACCELERATE_AGENT_PID": str(os.getpid()),
        }
        interface = interface_of(self._address)
        if interface is not None:
            own["GLOO_SOCKET_IFNAME"] = interface
        guard = Path(__file__).with_name("rank_process.py")
        self._process = subprocess.Popen(
            [sys.executable, str(guard), str(os.getpid()), *made],
            env={"PYTHONUNBUFFERED": "1", **os.environ, **own, **environment},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        pipes = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        readers = [
            threading.Thread(target=self._read, args=(name, pipe), name=f"read-{name}", daemon=True)
            for name, pipe in pipes.items()
        ]
        for one in readers:
            one.start()
        watcher = threading.Thread(
            target=self._watch, args=(readers,), name="watch-rank", daemon=True
        )
        watcher.start()

    def news(self, timeout: float) -> News:
        """Wait for output or for the end of the rank, but not longer than `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._ending, timeout)
        if self._ending is None:
            time.sleep(_BATCH)  # send lines that follow closely in one message
        with self._changed:
            ending = self._ending
            lines = list(self._lines)
            self._lines.clear()
        return News(lines, ending)

    def send_signal(self, number: int) -> None:
        """Send a signal to the rank, if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def stop(self, grace: float) -> None:
        """End the rank with SIGTERM, and after `grace` seconds with SIGKILL."""
        if self._process is None:
            return
        self.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace)
        self._kill()

    def result(self) -> bytes:
        """Return the pickled return value of a function."""
        return (self._folder / "result").read_bytes()

    def close(self) -> None:
        """End the rank, and remove its files."""
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self) -> None:
        """Kill the rank and all processes of its session, such as the workers of data loaders."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self, name: str, pipe: IO[bytes]) -> None:
        shown = 0.0
        for line in _split(pipe):
            text = line.decode("utf-8", errors="replace").rstrip("\n")
            if text.endswith("\r"):  # a progress bar, which is drawn over the next time
                if not text.strip() or time.monotonic() - shown < _PROGRESS:
                    continue
                shown = time.monotonic()
            with self._changed:
                self._lines.append((name, text.rstrip("\r")))
                self._changed.notify_all()

    def _watch(self, readers: Sequence[threading.Thread]) -> None:
        assert self._process is not None
        status = self._process.wait()
        when = time.time()
        last = time.monotonic() + _LINGER
        for one in readers:
            one.join(max(0.0, last - time.monotonic()))
        self._kill()  # children that it has left behind
        error = _text(self._folder / "error.json")
        stacks = _text(self._folder / "error.json.stacks")
        with self._changed:
            self._ending = Ending(status, self._process.pid, when, error, stacks)
            self._changed.notify_all()


def _split(pipe: IO[bytes]) -> Iterable[bytes]:
    r"""Yield lines that end with \n, and the states of a progress bar, which end with \r."""
    rest = b""
    while chunk := os.read(pipe.fileno(), 65536):
        *lines, rest = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            yield line.rpartition(b"\r")[2]
        before, ended, after = rest.rpartition(b"\r")
        if ended:
            yield before.rpartition(b"\r")[2] + b"\r"
            rest = after
    if rest:
        yield rest


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
