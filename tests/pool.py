"""Warm interpreters: ranks are forked from processes that have torch and the core imported.

Each parent is this file, run as a program of its own, apart from pytest: it imports, and has run
no operator, thread, process group or device call, which a fork would break or carry on (after one
backward a child hangs in OpenMP). It refuses to serve once it has a second thread.

A child becomes what `python SCRIPT` would be: its own session, environment, arguments, `sys.path`,
`__main__` and output. In the end it waits for its threads and runs what `atexit` holds, but takes no
modules apart: in a process of this size that costs more than most scripts. So what is different is
that end (no destructors of what is global), what is imported already, and variables that are read at
import or at start (`PYTHON*`, `OMP_*`, `TORCH_LOGS`). Tests of these ask for a real launch.

A rank has a parent of its own, as its hashes of strings differ from those of the other ranks: ranks
that disagree about the order of a set have to be found out.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

__all__ = ["Child", "run", "start"]

#: What every rank imports sooner or later.
_WARM = (
    "torch", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel", "torch._dynamo", "torch._inductor.compile_fx",
    "accelerate_core.accelerator", "accelerate_core.utils", "accelerate_testing.training",
    "accelerate_checkpoint",
    "accelerate_ddp", "accelerate_fsdp2",
)  # fmt: skip

# --- in pytest ------------------------------------------------------------------------------------


class _Parent:
    """A warm process; it has one child at a time."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        environ = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            # Older torches start a pool of compilers, and a thread, where Inductor is imported.
            env={
                **environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONIOENCODING": "utf-8",
                "TORCH_WARM_POOL": "0",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self.channel = ours
        self.answers = ours.makefile("r")

    def ask(self, task: Mapping[str, Any], out: int, err: int) -> None:
        socket.send_fds(self.channel, [json.dumps(task).encode() + b"\n"], [out, err])

    def close(self) -> None:
        self.channel.close()
        self.answers.close()
        self.process.wait(10)


_free: dict[int, list[_Parent]] = {}
_every: list[_Parent] = []
_lock = threading.Lock()


def _close() -> None:
    while _every:
        _every.pop().close()


class Child:
    """A process started by `start`."""

    def __init__(self, parent: _Parent, rank: int) -> None:
        self.parent, self.rank = parent, rank
        self._pid: int | None = None
        self._ended: int | None = None
        self._begun = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            said = self.parent.answers.readline()
        except ConnectionResetError:  # it ended before it had read its task
            said = ""
        self._pid = int(said or "0")
        self._begun.set()
        status = said and self.parent.answers.readline()
        if status:
            with _lock:
                _free.setdefault(self.rank, []).append(self.parent)
        self._ended = os.waitstatus_to_exitcode(int(status or "9"))  # the parent is gone, too

    def poll(self) -> int | None:
        """Return how it ended, as `Popen.returncode` says it; None while it runs."""
        return self._ended

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for its end, at most so long; return what `poll` does."""
        self._reader.join(seconds)
        return self._ended

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the child while it runs; SIGKILL goes to all of its session."""
        self._begun.wait()
        if self._ended is not None or not self._pid:
            return
        for tell in [os.killpg, os.kill] if number == signal.SIGKILL else [os.kill]:
            try:
                tell(self._pid, number)
            except ProcessLookupError:
                pass


def start(
    command: Sequence[str],
    environ: Mapping[str, str],
    out: IO[Any],
    err: IO[Any],
    rank: int = 0,
    *,
    cwd: str | Path | None = None,
) -> Child:
    """Begin what `python COMMAND` is, in a fork of the rank's warm interpreter.

    Args:
        command: a script, `-m` and a module, or `-c` and code; and arguments.
        environ: its whole environment.
        out: file its output goes to; several may share one.
    """
    with _lock:
        parents = _free[rank] = [one for one in _free.get(rank, ()) if one.process.poll() is None]
        if parents:
            parent = parents.pop()
        else:
            if not _every:
                atexit.register(_close)
            _every.append(parent := _Parent())
    task = {"command": list(command), "environ": dict(environ), "cwd": str(cwd or os.getcwd())}
    parent.ask(task, out.fileno(), err.fileno())
    return Child(parent, rank)


def run(
    command: Sequence[str | Path],
    environ: Mapping[str, str],
    timeout: float,
    rank: int = 0,
    *,
    cwd: str | Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run what `python COMMAND` is; return what `subprocess.run` would.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout` seconds, and was killed.
    """
    command = [str(one) for one in command]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out, tempfile.TemporaryFile("w+") as err:
        child = start(command, environ, out, err, rank, cwd=cwd)
        try:
            returncode = child.wait(timeout)
        finally:
            child.send(signal.SIGKILL)
            child.wait(5)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    if returncode is None:
        raise subprocess.TimeoutExpired(command, timeout, *texts)
    return subprocess.CompletedProcess(command, returncode, *texts)


# --- in the warm process --------------------------------------------------------------------------


def _serve(channel: socket.socket) -> dict[str, Any]:
    """Fork for each task, and tell its process and then how it ended; return in the child."""
    while True:
        text, files, *_ = socket.recv_fds(channel, 1 << 20, 2)
        while text and not text.endswith(b"\n"):
            text += channel.recv(1 << 20)
        if not text:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            channel.close()
            for number, file in enumerate(files, 1):
                os.dup2(file, number)
                os.close(file)
            return dict(json.loads(text))
        for file in files:
            os.close(file)
        channel.sendall(b"%d\n" % pid)
        channel.sendall(b"%d\n" % os.waitpid(pid, 0)[1])


def _become(task: dict[str, Any], base: list[str]) -> Callable[[], object]:
    """Make this process what was asked for; return what runs the code."""
    os.setsid()
    os.chdir(task["cwd"])
    os.environ.clear()
    os.environ.update(task["environ"])
    sys.argv = task["command"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if sys.argv[0] == "-c":
        folder, source, origin = "", sys.argv.pop(1), "<string>"
    elif sys.argv[0] == "-m":
        folder, module = os.getcwd(), sys.argv.pop(1)
    else:
        main.__file__ = origin = str(Path(sys.argv[0]).absolute())
        folder, source = str(Path(origin).resolve().parent), Path(origin).read_text()
    mine = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    sys.path[:] = [folder, *mine, *base]
    # What is drawn without a seed differs from process to process. Python's own generator is
    # seeded anew by the fork.
    torch = sys.modules["torch"]
    torch.default_generator.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if sys.argv[0] == "-m":
        return partial(runpy._run_module_as_main, module)
    return partial(exec, compile(source, origin, "exec", dont_inherit=True), main.__dict__)


def _leave(run: Callable[[], object]) -> None:
    """Run the code and end as an interpreter does, but for taking its modules apart."""
    status = 1
    try:
        run()
        status = 0
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            status = left.code or 0
        else:
            print(left.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


_Cached = type(cache(os.getpid))


def _warm_up() -> None:
    import importlib
    from importlib.util import find_spec

    for name in _WARM:
        if find_spec(name.partition(".")[0]):  # not every torch has all of ours
            importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, "an import has started a thread: a fork would lose it"
    gc.collect()
    # What was looked for on the way holds for this environment, not for the children's.
    for one in gc.get_objects():
        if type(one) is _Cached and str(one.__module__).startswith("accelerate_"):
            one.cache_clear()
    gc.freeze()


if __name__ == "__main__":
    _base = sys.path[1:]
    _warm_up()
    _leave(_become(_serve(socket.socket(fileno=int(sys.argv[1]))), _base))
