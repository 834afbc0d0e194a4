"""Forks the ranks of tests from warm interpreters, which have already imported torch and the core.

Each warm process runs this file as a program, separately from pytest. It only imports modules. It never
runs an operator, thread, process group or device call, which would not survive a fork: after a single
backward, for example, children hang in OpenMP. It refuses to fork once it has a second thread.

A child behaves like `python SCRIPT`, with its own session, environment, arguments, `sys.path`, `__main__`
and output. At the end, it waits for its threads and runs the functions registered with `atexit`, except
some that the warm process registered. It does not tear down its modules, which would take longer than
most scripts. So the differences to a new process are: destructors of global objects don't run, modules
are already imported, and variables that are read during imports or at the start (`PYTHON*`, `OMP_*`,
`TORCH_LOGS`) have no effect. Tests that depend on these must use a real launch.

Even and odd ranks have different warm processes, so that hashes of strings differ between ranks. This
finds code in which ranks disagree about the order of a set.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

__all__ = ["EXECUTABLE", "Child", "run", "start"]

#: Environment variable with the value of `sys.executable`, if it is not the interpreter itself.
EXECUTABLE = "POOL_EXECUTABLE"

#: Modules that most ranks import.
_WARM = (
    "torch", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel", "torch._dynamo", "torch._inductor.compile_fx",
    "accelerate_core.accelerator", "accelerate_core.utils", "accelerate_testing.training",
    "accelerate_checkpoint",
    "accelerate_ddp", "accelerate_fsdp2",
    # What the first Accelerator of a process imports.
    "accelerate_launch.uncaught", "accelerate_launch.loop_checks", "accelerate_launch.misuse",
    "accelerate_watch.plugin", "pydantic.dataclasses",
    # The command line and torch's agent (see `warm_python`).
    "click", "psutil", "rich.console", "rich.table", "torch.distributed.run", "yaml",
)  # fmt: skip

# --- in pytest ------------------------------------------------------------------------------------


class _Parent:
    """A warm process and its running children.

    Args:
        more: modules that it imports in addition to `_WARM`.
        base: the warm process that it is forked from; without one, it is a new interpreter.
    """

    def __init__(self, more: tuple[str, ...] = (), base: _Parent | None = None) -> None:
        ours, theirs = socket.socketpair()
        self.process: subprocess.Popen[bytes] | Child
        if base is None:
            self.process = self._new_interpreter(theirs.fileno())
        else:
            with open(os.devnull, "w") as nothing:
                files = [theirs.fileno(), nothing.fileno(), sys.__stderr__.fileno()]
                self.process = base.ask({"imports": more}, files)
        theirs.close()
        self.channel = ours
        self._asked = deque[Child]()
        self._running: dict[int, Child] = {}
        self._asking = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _new_interpreter(self, channel: int) -> subprocess.Popen[bytes]:
        environ = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.Popen(
            [sys.executable, __file__],
            env={
                **environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONIOENCODING": "utf-8",
                # Importing Inductor starts a pool of compilers and a thread in older versions of
                # torch. pyarrow, which DeepSpeed imports, starts a thread that frees memory.
                "TORCH_WARM_POOL": "0",
                "JE_ARROW_MALLOC_CONF": "background_thread:false",
            },
            stdin=channel,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def ask(self, task: Mapping[str, Any], files: Sequence[int]) -> Child:
        """Start a task with these files as its stdin, stdout and stderr."""
        child = Child()
        with self._asking:
            self._asked.append(child)
            try:
                socket.send_fds(self.channel, [json.dumps(task).encode() + b"\n"], list(files))
            except OSError:  # the process has ended; the reader marks the child as ended
                pass
        if not self._reader.is_alive():
            child.ended(9)
        return child

    def _read(self) -> None:
        """Mark children as started, in the order of their requests, and as ended."""
        try:
            for line in self.channel.makefile("r"):
                pid, *status = map(int, line.split())
                if status:
                    self._running.pop(pid).ended(*status)
                else:
                    child = self._running[pid] = self._asked.popleft()
                    child.begun(pid)
        except ConnectionResetError:  # the process ended before it had read a task
            pass
        for child in (*self._running.values(), *self._asked):
            child.ended(9)  # the children end with their parent

    def close(self) -> None:
        self.channel.shutdown(socket.SHUT_RDWR)
        self.process.wait(10)
        self._reader.join(5)
        self.channel.close()


#: Whether the rank is odd, and additional modules -> the process from which its children are forked.
_parents: dict[tuple[int, tuple[str, ...]], _Parent] = {}
_every: list[_Parent] = []
_lock = threading.Lock()


def _close() -> None:
    while _every:
        _every.pop().close()


class Child:
    """A process started by `start`."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self._status: int | None = None
        self._has_begun = threading.Event()
        self._has_ended = threading.Event()

    def begun(self, pid: int) -> None:
        """Record that the child is running."""
        self.pid = pid
        self._has_begun.set()

    def ended(self, status: int) -> None:
        """Record that the child has ended with this status from `os.waitpid`."""
        self._status = os.waitstatus_to_exitcode(status)
        self._has_begun.set()
        self._has_ended.set()

    def poll(self) -> int | None:
        """Return the exit status in the form of `Popen.returncode`, or None while it is running."""
        return self._status

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for the child to end, with a time limit. Return the result of `poll`."""
        self._has_ended.wait(seconds)
        return self._status

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the child if it is running. SIGKILL is sent to its whole session."""
        self._has_begun.wait()
        if self._status is not None or not self.pid:
            return
        for kill in [os.killpg, os.kill] if number == signal.SIGKILL else [os.kill]:
            try:
                kill(self.pid, number)
            except ProcessLookupError:
                pass


def start(
    command: Sequence[str],
    environ: Mapping[str, str],
    out: IO[Any] | int,
    err: IO[Any] | int,
    rank: int = 0,
    *,
    cwd: str | Path | None = None,
    stdin: int | None = None,
    more: Sequence[str] = (),
) -> Child:
    """Start `python COMMAND` as a fork of a warm interpreter.

    Args:
        command: a script, `-m` and a module, or `-c` and code, then arguments. `-u` may come first.
        environ: the whole environment.
        out, err: files for the output. Several children may share a file.
        stdin: file descriptor of the input. The default is an empty input.
        more: modules that are imported before the fork, in addition to `_WARM`.
    """
    with _lock:
        parent = _warm_process(rank % 2)
        if more:
            parent = _warm_process(rank % 2, tuple(more), parent)
    task = {"command": list(command), "environ": dict(environ), "cwd": str(cwd or os.getcwd())}
    nothing = os.open(os.devnull, os.O_RDONLY)
    files = [nothing if stdin is None else stdin]
    files += [one if isinstance(one, int) else one.fileno() for one in (out, err)]
    try:
        return parent.ask(task, files)
    finally:
        os.close(nothing)


def _warm_process(parity: int, more: tuple[str, ...] = (), base: _Parent | None = None) -> _Parent:
    parent = _parents.get((parity, more))
    if parent is None or parent.process.poll() is not None:
        if not _every:
            atexit.register(_close)
        parent = _parents[parity, more] = _Parent(more, base)
        _every.append(parent)
    return parent


def run(
    command: Sequence[str | Path],
    environ: Mapping[str, str],
    timeout: float,
    rank: int = 0,
    *,
    cwd: str | Path | None = None,
    more: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run `python COMMAND` as a fork, and return the same as `subprocess.run`.

    Args:
        more: modules that are imported before the fork, in addition to `_WARM`.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout` seconds and was killed.
    """
    command = [str(one) for one in command]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out, tempfile.TemporaryFile("w+") as err:
        child = start(command, environ, out, err, rank, cwd=cwd, more=more)
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
    """Fork for each task, and report each child's id and later its status. Returns in the child."""
    children: dict[int, int] = {}
    while True:
        ready, *_ = select.select([channel, *children], [], [])
        for one in ready:
            if one is not channel:
                pid = children.pop(one)
                os.close(one)
                channel.sendall(b"%d %d\n" % os.waitpid(pid, 0))
        if channel not in ready:
            continue
        text, files, *_ = socket.recv_fds(channel, 1 << 20, 3)
        while text and not text.endswith(b"\n"):
            text += channel.recv(1 << 20)
        if not text:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            channel.close()
            for number in children:
                os.close(number)
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            return dict(json.loads(text))
        for file in files:
            os.close(file)
        children[os.pidfd_open(pid)] = pid
        channel.sendall(b"%d\n" % pid)


def _become(task: dict[str, Any], base: list[str]) -> Callable[[], object]:
    """Set up this process for its task. Return a function that runs the code."""
    os.setsid()
    os.chdir(task["cwd"])
    os.environ.clear()
    os.environ.update(task["environ"])
    sys.executable = os.environ.get(EXECUTABLE, sys.executable)
    sys.argv = task["command"]
    if sys.argv[0] == "-u":
        del sys.argv[0]
        sys.stdout.reconfigure(line_buffering=True)
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
    # Unseeded generators must differ between processes. Python reseeds its own after a fork.
    torch = sys.modules["torch"]
    torch.default_generator.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if sys.argv[0] == "-m":
        return partial(runpy._run_module_as_main, module)
    return partial(exec, compile(source, origin, "exec", dont_inherit=True), main.__dict__)


def _leave(run: Callable[[], object]) -> None:
    """Run the code and exit like an interpreter, but without tearing down modules."""
    status = 1
    try:
        run()
        status = 0
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            status = left.code or 0
        else:
            print(left.code, file=sys.stderr)
    except BaseException as error:
        sys.last_value = error  # as Python does
        sys.excepthook(*sys.exc_info())
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


_Cached = type(cache(os.getpid))


def _warm_up(more: Sequence[str]) -> None:
    import importlib
    from importlib.util import find_spec

    for name in (*_WARM, *more):
        if find_spec(name.partition(".")[0]):  # some packages need a newer torch
            importlib.import_module(name)
    # pydantic looks for its plugins in all distributions when it creates its first validator.
    importlib.import_module("pydantic").TypeAdapter(int)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, "an import has started a thread, which a fork would lose"
    gc.collect()
    # Cached results depend on the environment, which differs in the children.
    for one in gc.get_objects():
        if type(one) is _Cached and str(one.__module__).startswith("accelerate_"):
            one.cache_clear()
    gc.freeze()
    # At the exit of each child, these would take more time than its start.
    atexit.unregister(sys.modules["torch._dynamo.utils"].dump_compile_times)
    for finalizer in [*weakref.finalize._registry]:  # they tear down modules
        finalizer.atexit = False


def _serve_children(imports: Sequence[str]) -> dict[str, Any]:
    """Import modules, then fork for each task on stdin. Return in the child that runs a script."""
    channel = socket.socket(fileno=os.dup(0))
    _warm_up(imports)
    task = _serve(channel)
    return _serve_children(task["imports"]) if "imports" in task else task


if __name__ == "__main__":
    _base = sys.path[1:]
    _leave(_become(_serve_children(()), _base))
