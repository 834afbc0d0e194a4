"""Simulated machines on this host, each with its own processes, host name and network address.

Every machine is a set of Linux namespaces. All of them are inside the namespaces of one machine named
`login`, so killing the first process of `login` ends everything: the kernel does it when pytest ends,
even after SIGKILL. The machines share the files of this host, except /run, the hosts file and the
client configuration of ssh.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from support import clean_environment

LOGIN = "login"
NODES = ("n1", "n2")
ADDRESSES = {LOGIN: "10.78.0.1", "n1": "10.78.0.11", "n2": "10.78.0.12"}
TIMEOUT = 120

_NAMESPACES = ("--mount", "--pid", "--net", "--uts")
#: Unlike `sleep`, bash collects the exit status of orphaned processes, as the first process must.
_FIRST = ("bash", "-c", "while true; do sleep 3600 & wait; done")
#: If the process that runs this command ends, the machine ends.
_MACHINE = (
    *("unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"),
    *("--propagation", "private", *_FIRST),
)


def run_environment() -> dict[str, str]:
    """Return the environment of runs: CPUs, one thread, and this Python first on the path."""
    environ = clean_environment(OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="1")
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ["PATH"]])
    # As root, as in containers.
    return {**environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class Machines:
    """The machines of one test session. `close` ends all processes on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._first: dict[str, int] = {}
        #: The `unshare` command of each machine.
        self._starters: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start the login machine, the network, and all nodes."""
        self._boot(["setpriv", "--pdeathsig", "KILL", *_MACHINE], LOGIN)
        hosts = self.folder / "hosts"
        lines = [f"{address} {name}" for name, address in ADDRESSES.items()]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        setup = [
            f"mount --bind {shlex.quote(str(hosts))} /etc/hosts",
            "mount -t tmpfs tmpfs /run",
            f"hostname {LOGIN}",
            "ip link set lo up",
            "ip link add br0 type bridge",
            f"ip addr add {ADDRESSES[LOGIN]}/24 dev br0",
            "ip link set br0 up",
        ]
        self.check(LOGIN, "sh", "-ec", "; ".join(setup))
        for name in NODES:
            self.boot(name)

    def boot(self, name: str) -> None:
        """Start a node and connect it to the network."""
        # The parent of a node is this process, but its namespaces are inside those of `login`.
        self._boot(self.command(LOGIN, *_MACHINE), name)
        cable = f"ip link add v{name} type veth peer name eth0 netns {self._inside(name)}"
        self.check(LOGIN, "sh", "-ec", f"{cable}; ip link set v{name} master br0 up")
        setup = [
            f"hostname {name}",
            "mount -t tmpfs tmpfs /run",
            "ip link set lo up",
            f"ip addr add {ADDRESSES[name]}/24 dev eth0",
            "ip link set eth0 up",
        ]
        self.check(name, "sh", "-ec", "; ".join(setup))

    def crash(self, name: str) -> None:
        """End all processes of a node at once, as a power failure does."""
        os.kill(self._first.pop(name), signal.SIGKILL)
        self._starters.pop(name).wait(20)

    def close(self) -> None:
        """End all machines."""
        for name in [*NODES, LOGIN]:
            if name in self._first:
                with contextlib.suppress(ProcessLookupError):
                    self.crash(name)

    def command(self, name: str, *words: str | Path) -> list[str]:
        """Return the command that runs `words` on a machine, in the current directory."""
        # Without --wd, the command would start in the root directory.
        enter = ["nsenter", "--target", str(self._first[name]), *_NAMESPACES, "--wd=."]
        return [*enter, "--", *map(str, words)]

    def run(
        self,
        name: str,
        *words: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = TIMEOUT,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine until it ends."""
        with self.started(name, *words, env=env, cwd=cwd) as process:
            out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(list(map(str, words)), process.returncode, out, err)

    @contextlib.contextmanager
    def started(
        self,
        name: str,
        *words: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Iterator[subprocess.Popen[str]]:
        """Start a command on a machine, and kill it and its children at the end of the block."""
        process = subprocess.Popen(
            self.command(name, *words),
            env=None if env is None else dict(env),
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def check(self, name: str, *words: str | Path, env: Mapping[str, str] | None = None) -> str:
        """Run a command that must succeed, and return its output."""
        done = self.run(name, *words, env=env)
        assert done.returncode == 0, f"{words} on {name}: {done.stderr or done.stdout}"
        return done.stdout

    def processes(self, mark: str) -> list[str]:
        """Return the command lines on all machines that contain `mark`."""
        listed = subprocess.run(
            ["ps", "-eo", "pid,args", "-ww"], capture_output=True, text=True, check=True
        )
        return [line for line in listed.stdout.splitlines() if mark in line]

    def _boot(self, command: Sequence[str], name: str) -> None:
        with (self.folder / f"{name}.log").open("a") as log:
            starter = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stderr=log, start_new_session=True
            )
        self._starters[name] = starter
        until = time.monotonic() + 20
        while time.monotonic() < until:
            first = _first_below(starter.pid)
            if first is not None:
                self._first[name] = first
                return
            assert starter.poll() is None, f"{shlex.join(command)} exited with {starter.returncode}"
            time.sleep(0.02)
        raise AssertionError(f"the machine {name} did not start")

    def _inside(self, name: str) -> str:
        """Return the process ID of a node's first process as seen from `login`."""
        status = Path(f"/proc/{self._first[name]}/status").read_text()
        (line,) = [one for one in status.splitlines() if one.startswith("NSpid:")]
        return line.split()[-2]


def _first_below(pid: int) -> int | None:
    """Return the first process of the machine that a process has started, None if it is not ready."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for child in map(int, children):
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            return child if words[0] == _FIRST[0].encode() else _first_below(child)
    except OSError:  # it has just ended
        pass
    return None
