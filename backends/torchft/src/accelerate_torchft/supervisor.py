"""The process that starts a lighthouse and the replicas, and starts a dead replica again.

The run has succeeded when a replica ends with status 0. The others train in lockstep with it, so they end
at about the same time, too. One that still starts or heals then is stopped.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Seconds after SIGTERM before a replica is killed.
_TERM = 30.0
#: Seconds between two looks at the replicas.
_TICK = 0.1


@dataclass
class Watched:
    """One replica: its process, and how often it was started again."""

    number: int
    process: subprocess.Popen[bytes]
    joined: Path
    restarts: int = 0


@dataclass
class Supervisor:
    """Starts replicas and watches them.

    Args:
        command: the command of one replica.
        lighthouse: the address that replicas connect to.
        max_restarts: how often each replica is started again.
        grace: seconds that the others may take to end after the first success.
        folder: for files that replicas create when they join a quorum.
    """

    command: Sequence[str]
    lighthouse: str
    max_restarts: int
    grace: float
    folder: Path
    quiet: bool = False
    running: list[Watched] = field(default_factory=list)
    #: The signal that ends this process.
    ended_by: int = 0

    def start(self, number: int) -> Watched:
        """Start a replica in a process group of its own."""
        joined = self.folder / str(number)
        joined.unlink(missing_ok=True)
        its = {
            "TORCHFT_LIGHTHOUSE": self.lighthouse,
            "ACCELERATE_TORCHFT_REPLICA": str(number),
            "ACCELERATE_TORCHFT_JOINED": str(joined),
        }
        environment = {"RUST_LOG": "warn", **os.environ, **its}
        process = subprocess.Popen(self.command, env=environment, start_new_session=True)
        return Watched(number, process, joined)

    def run(self, numbers: Sequence[int]) -> int:
        """Start the replicas, watch them until the run is over, and return its status."""
        self.running = [self.start(number) for number in numbers]
        try:
            return self._watch()
        finally:
            _stop(self.running)

    def _watch(self) -> int:
        deadline = None
        status = 0
        while self.running:
            if self.ended_by:
                return self._pass_on()
            time.sleep(_TICK)
            for one in list(self.running):
                code = one.process.poll()
                if code is None or one not in self.running:
                    continue
                self.running.remove(one)
                if code == 0:
                    deadline = deadline or time.monotonic() + self.grace
                    late = [other for other in self.running if not other.joined.exists()]
                    _stop(late)  # otherwise they would train alone, from the beginning
                    self.running = [other for other in self.running if other not in late]
                elif deadline is None:
                    status = self._restart(one, code) or status
            if deadline is not None and time.monotonic() > deadline:
                break
        return 0 if deadline is not None else status

    def _restart(self, one: Watched, code: int) -> int:
        """Start a dead replica again; return its status if it was started too often."""
        _kill(one.process)  # ranks that a killed agent left behind
        if one.restarts >= self.max_restarts:
            self._say(
                f"replica {one.number} ended with status {code}, and was started again "
                f"{one.restarts} times, which is the limit (max_restarts). The others continue."
            )
            return code if code > 0 else 128 - code
        self._say(f"replica {one.number} ended with status {code}; it is started again.")
        again = self.start(one.number)
        again.restarts = one.restarts + 1
        self.running.append(again)
        return 0

    def _pass_on(self) -> int:
        """Pass a signal on to the replicas, and wait for them; return the status of the first."""
        for one in self.running:
            with suppress(ProcessLookupError):
                one.process.send_signal(self.ended_by)
        until = time.monotonic() + _TERM
        codes = []
        for one in self.running:
            with suppress(subprocess.TimeoutExpired):
                codes.append(one.process.wait(max(until - time.monotonic(), 0.1)))
        positive = [code for code in codes if code > 0]
        return positive[0] if positive else 128 + self.ended_by

    def _say(self, text: str) -> None:
        if not self.quiet:
            print(f"accelerate-core: {text}", file=sys.stderr, flush=True)


def _stop(watched: Sequence[Watched]) -> None:
    """End replicas: first with SIGTERM, then by force."""
    for one in watched:
        if one.process.poll() is None:
            one.process.terminate()
    until = time.monotonic() + _TERM
    for one in watched:
        with suppress(subprocess.TimeoutExpired):
            one.process.wait(max(until - time.monotonic(), 0.1))
        _kill(one.process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a replica with all processes that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _free_port() -> int:
    """Return a port that is free on all addresses, because the lighthouse listens on all of them."""
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::", 0))
        return int(probe.getsockname()[1])


def _start_lighthouse(given: Any) -> tuple[subprocess.Popen[bytes], str]:
    port = _free_port()
    command = [sys.executable, "-m", "accelerate_torchft.lighthouse", "--port", str(port)]
    for name in ("min_replicas", "join_timeout", "heartbeat_timeout"):
        command += [f"--{name}", str(getattr(given, name))]
    # It ends when its stdin closes, even if this process is killed.
    environment = {"RUST_LOG": "warn", **os.environ}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, start_new_session=True, env=environment
    )
    return process, f"http://127.0.0.1:{port}"


def main(arguments: list[str] | None = None) -> int:
    """Run replicas from the command line."""
    parser = argparse.ArgumentParser(prog="accelerate_torchft.supervisor")
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--max_restarts", type=int, default=0)
    parser.add_argument("--min_replicas", type=int, default=1)
    parser.add_argument("--join_timeout", type=float, default=60.0)
    parser.add_argument("--heartbeat_timeout", type=float, default=5.0)
    parser.add_argument("--grace", type=float, default=60.0)
    parser.add_argument("--lighthouse")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)
    server = None
    address = given.lighthouse
    if address is None:
        server, address = _start_lighthouse(given)
    folder = Path(tempfile.mkdtemp(prefix="accelerate_torchft_"))
    supervisor = Supervisor(
        given.command, address, given.max_restarts, given.grace, folder, given.quiet
    )

    def end(number: int, _: Any) -> None:
        supervisor.ended_by = number

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        return supervisor.run(range(given.first, given.first + given.replicas))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if server is not None and server.stdin is not None:
            server.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                server.wait(5)
            _kill(server)


if __name__ == "__main__":
    sys.exit(main())
