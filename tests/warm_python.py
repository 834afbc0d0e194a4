"""A `python` and an `accelerate-core` that fork from the pool, for tests that run commands of pages.

Processes that such a command starts with `sys.executable`, such as the launcher's agent and the ranks,
are forked too. This saves most of the time of a launch, which is spent importing torch. Forked processes
have their own environment, files and signals (see `pool`). The process id that the test sees belongs to a
small program that forwards signals and the exit status.

Tests of launching itself must start real interpreters, because a rank from the pool is not a child of the
agent, so its failure is reported differently.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

import pool

__all__ = ["MORE", "warm_python"]

#: Environment variable with additional modules that the pool imports before the fork.
MORE = "POOL_MORE"

#: Starts in a few milliseconds, because it does not import `site`. For options other than -u, and for
#: folders, it starts a real interpreter.
_PROGRAM = """#!{python} -ISE
import json, os, signal, socket, sys
words = sys.argv[1:]
first = [one for one in words if one != "-u"][:1]
if not first or first[0].startswith("-") and first[0] not in ("-c", "-m") or os.path.isdir(first[0]):
    os.execv({python!r}, [{python!r}, *words])
pool = socket.socket(socket.AF_UNIX)
pool.connect({address!r})
task = {{"command": words, "environ": dict(os.environ), "cwd": os.getcwd()}}
socket.send_fds(pool, [b"{{"], [0, 1, 2])
pool.sendall(json.dumps(task).encode()[1:] + b"\\n")
for one in {signals!r}:
    signal.signal(one, lambda number, _: pool.sendall(b"%d\\n" % number))
status = int(pool.makefile().readline())
if status < 0:
    if -status in {signals!r}:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""
_SIGNALS = [
    int(one)
    for one in (
        signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2,
    )
]  # fmt: skip


@cache
def warm_python() -> Path:
    """Return the program to use instead of `sys.executable`. `accelerate-core` is next to it."""
    # The address of a socket may have at most 107 bytes, so this is not in pytest's long folders.
    folder = Path(tempfile.mkdtemp(prefix="warm_python_", dir="/tmp"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address = str(folder / "pool")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    threading.Thread(target=_serve, args=(listener, str(folder / "python")), daemon=True).start()
    python = folder / "python"
    python.write_text(
        _PROGRAM.format(python=sys.executable, address=address, signals=_SIGNALS), encoding="utf-8"
    )
    command = folder / "accelerate-core"
    command.write_text(f'#!/bin/sh\nexec {python} -m accelerate_core.cli "$@"\n', encoding="utf-8")
    for one in (python, command):
        one.chmod(0o755)
    return python


def _serve(listener: socket.socket, python: str) -> None:
    while True:
        channel, _ = listener.accept()
        threading.Thread(target=_answer, args=(channel, python), daemon=True).start()


def _answer(channel: socket.socket, python: str) -> None:
    """Fork for one command. Forward signals to it, and then report its status."""
    begin, files, *_ = socket.recv_fds(channel, 1, 3)
    reader = channel.makefile("rb")
    task = json.loads(begin + reader.readline())
    environ = {**task["environ"], pool.EXECUTABLE: python}
    rank = int(environ.get("RANK", 0))
    stdin, out, err = files
    more = environ.get(MORE, "").split()
    child = pool.start(
        task["command"], environ, out, err, rank, cwd=task["cwd"], stdin=stdin, more=more
    )
    for file in files:
        os.close(file)

    def pass_signals_on() -> None:
        for line in reader:
            child.send(signal.Signals(int(line)))
        child.send(signal.SIGKILL)  # the program was killed, or already has the status

    threading.Thread(target=pass_signals_on, daemon=True).start()
    status = child.wait()
    try:
        channel.sendall(b"%d\n" % (-signal.SIGKILL if status is None else status))
    except OSError:  # the program is gone
        pass
    channel.close()
