"""Record why a rank ended, so that the launcher shows the first failure and not its echo.

torchrun hands each worker a file (`TORCHELASTIC_ERROR_FILE`) for the exception it
dies of and prints the earliest one as the root cause, by whole seconds. Ranks that
fail *because* another one did usually fail within that same second; they wait here
until the launcher has seen the culprit and ends them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType

from accelerate_core import errors

#: Seconds an echo waits; the launcher polls ten times a second by default.
_ECHO_WAIT = 3.0

#: What transports say, and no more than that, when another rank has gone.
_ECHO = re.compile(
    "connection (closed|reset) by peer|connection refused|broken pipe|socket closed"
    "|application timeout caused pair closure|remote process exited|ncclremoteerror"
    "|failed to recv, got 0 bytes",
    re.IGNORECASE,
)

#: Makes a rank write the stacks of its threads beside its error file; nothing else uses the signal.
DUMP_SIGNAL: signal.Signals | None = getattr(signal, "SIGVTALRM", None)
DUMP_SUFFIX = ".where"

_installed = False
_happened = False


def install() -> None:
    """Record uncaught exceptions in the file that torchrun reads. Calling this again has no effect.

    This also enables `faulthandler`: tensors that do not fit together abort the process in C++,
    without a Python traceback.
    """
    global _installed
    if _installed:
        return
    _installed = True
    errors_at, by_agent = os.environ.get("TORCHELASTIC_ERROR_FILE"), _agent_is_parent()
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a stderr without a descriptor
        # Our agent shows it, and names the collective in which the process was.
        faulthandler.enable(
            open(f"{errors_at}.stacks", "w") if errors_at and by_agent else sys.stderr  # noqa: SIM115
        )
    if errors_at and by_agent and DUMP_SIGNAL is not None:
        with contextlib.suppress(OSError):
            # When another rank has timed out, the agent asks this one where it is.
            stacks = open(f"{errors_at}{DUMP_SUFFIX}", "w")  # noqa: SIM115
            faulthandler.register(DUMP_SIGNAL, stacks)
    # What atexit calls comes after the wait for threads; these come before, where Python has them. The
    # first is called last: pools have been told to end.
    getattr(threading, "_threading_atexits", []).insert(0, _name_threads)
    errors.shorten_uncaught()
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _happened
        _happened = True
        errors.shorten(error)
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if file and not isinstance(error, KeyboardInterrupt):
            # First, so that an echo is not even printed: the launcher ends this process meanwhile.
            wait_for_culprit(error)
            if _record(error, Path(file), _agent_is_parent() and errors.prints_only(previous)):
                return
        previous(kind, error, trace)
        sys.stderr.flush()

    sys.excepthook = hook


def _agent_is_parent() -> bool:
    return os.environ.get("ACCELERATE_AGENT_PID") == str(os.getppid())


def _name_threads() -> None:
    """Name the threads for which the process waits at its end: nobody else does."""
    waited = [t for t in threading.enumerate() if not (t.daemon or t is threading.main_thread())]
    last = time.monotonic() + 2.0  # who was told to end has that long
    # No timer: since Python 3.12 nothing can start a thread here.
    for one in waited:
        one.join(max(0.0, last - time.monotonic()))
    held = [(t.name, getattr(t, "_target", None) or type(t)) for t in waited if t.is_alive()]
    said = ", ".join(f"{name} of {code.__module__}" for name, code in held)
    if said:
        sys.stderr.write(f"Waiting for threads: {said} (end_training() ends those of plugins)\n")


def happened() -> bool:
    """Tell whether an uncaught exception is ending this process."""
    return _happened


def is_failure(error: BaseException | None) -> bool:
    """Return whether an exception means that the script failed. Only a successful exit doesn't."""
    if error is None or isinstance(error, (StopIteration, GeneratorExit)):
        return False
    return error.code not in (None, False, 0) if isinstance(error, SystemExit) else True


def wait_for_culprit(error: BaseException) -> None:
    """Give the launcher time to see the rank that failed first, if this failure is its echo."""
    if isinstance(error, RuntimeError | OSError) and _ECHO.search(str(error)):
        time.sleep(_ECHO_WAIT)


def _record(error: BaseException, file: Path, left_to_agent: bool) -> bool:
    """Write the exception in torchrun's form, unless something was written before.

    Returns whether it was written for our agent, which shows each traceback once.
    """
    trace = "".join(traceback.format_exception(error))
    more = {"py_callstack": trace, "timestamp": str(int(time.time())), "left": left_to_agent}
    said = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": more}}
    try:
        if not file.exists() or not file.stat().st_size:
            file.write_text(json.dumps(said), encoding="utf-8")
            return left_to_agent
    except OSError as problem:
        sys.stderr.write(f"The failure could not be written to {file}: {problem}\n")
    return False
