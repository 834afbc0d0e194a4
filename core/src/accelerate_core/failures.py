"""Record why a rank failed, so that the launcher shows the first failure rather than its echoes.

torchrun gives each worker a file (`TORCHELASTIC_ERROR_FILE`) for its uncaught exception, and reports the
earliest one as the root cause, with a resolution of one second. An echo, the failure of a rank *because*
another rank failed, usually comes within that second. Such ranks wait until the launcher has
detected the first failure and stops them.
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

#: Seconds that an echo waits. The launcher polls ten times a second by default.
_ECHO_WAIT = 3.0

#: Transport errors whose only meaning is that another rank is gone.
_ECHO = re.compile(
    "connection (closed|reset) by peer|connection refused|broken pipe|socket closed"
    "|application timeout caused pair closure|remote process exited|ncclremoteerror"
    "|failed to recv, got 0 bytes",
    re.IGNORECASE,
)

#: On this signal, a rank writes the stacks of its threads to a file next to its error file.
DUMP_SIGNAL: signal.Signals | None = getattr(signal, "SIGVTALRM", None)
DUMP_SUFFIX = ".where"

_installed = False
_happened = False


def install() -> None:
    """Record uncaught exceptions in the file that torchrun reads. Calling this again has no effect.

    This also enables `faulthandler`, because mismatched tensors in a collective can abort the process in
    C++ without a Python traceback.
    """
    global _installed
    if _installed:
        return
    _installed = True
    errors_at, by_agent = os.environ.get("TORCHELASTIC_ERROR_FILE"), _agent_is_parent()
    # stderr may have no file descriptor.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        # Our agent shows these stacks, and names the collective that the process was in.
        faulthandler.enable(
            open(f"{errors_at}.stacks", "w") if errors_at and by_agent else sys.stderr  # noqa: SIM115
        )
    if errors_at and by_agent and DUMP_SIGNAL is not None:
        with contextlib.suppress(OSError, ValueError):  # another thread cannot ignore signals
            # faulthandler restores this at exit. The default would end a process that is exiting.
            signal.signal(DUMP_SIGNAL, signal.SIG_IGN)
        with contextlib.suppress(OSError):
            # When another rank times out, the agent requests the stacks of this one.
            stacks = open(f"{errors_at}{DUMP_SUFFIX}", "w")  # noqa: SIM115
            faulthandler.register(DUMP_SIGNAL, stacks)
    # atexit callbacks run after Python waits for threads. These callbacks, if Python has them, run before.
    # The first in the list runs last, after thread pools were asked to end.
    getattr(threading, "_threading_atexits", []).insert(0, _name_threads)
    errors.shorten_uncaught()
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _happened
        _happened = True
        errors.shorten(error)
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if file and not isinstance(error, KeyboardInterrupt):
            # Wait before printing: the launcher stops an echo meanwhile, so it is never printed.
            wait_for_culprit(error)
            if record(error, Path(file), _agent_is_parent() and errors.prints_only(previous)):
                return
        previous(kind, error, trace)
        sys.stderr.flush()

    sys.excepthook = hook


def _agent_is_parent() -> bool:
    return os.environ.get("ACCELERATE_AGENT_PID") == str(os.getppid())


def _name_threads() -> None:
    """Print the threads that keep the process from exiting, because Python doesn't name them."""
    waited = [t for t in threading.enumerate() if not (t.daemon or t is threading.main_thread())]
    last = time.monotonic() + 2.0  # threads that were asked to end have this long
    # A timer is impossible here, because Python 3.12 and later cannot start a thread at exit.
    for one in waited:
        one.join(max(0.0, last - time.monotonic()))
    held = [(t.name, getattr(t, "_target", None) or type(t)) for t in waited if t.is_alive()]
    said = ", ".join(f"{name} of {code.__module__}" for name, code in held)
    if said:
        sys.stderr.write(
            f"Waiting for threads: {said} (end_training() ends the threads of plugins)\n"
        )


def happened() -> bool:
    """Return whether an uncaught exception is ending this process."""
    return _happened


def is_failure(error: BaseException | None) -> bool:
    """Return whether an exception means that the script failed: all but a successful exit do."""
    if error is None or isinstance(error, (StopIteration, GeneratorExit)):
        return False
    return error.code not in (None, False, 0) if isinstance(error, SystemExit) else True


def wait_for_culprit(error: BaseException) -> None:
    """If this failure is an echo, give the launcher time to detect the rank that failed first."""
    if isinstance(error, RuntimeError | OSError) and _ECHO.search(str(error)):
        time.sleep(_ECHO_WAIT)


def record(error: BaseException, file: Path, left_to_agent: bool) -> bool:
    """Write the exception in torchrun's format, unless the file already has content.

    Returns whether our agent will show it. The agent shows each traceback once.
    """
    trace = "".join(traceback.format_exception(error))
    more = {"py_callstack": trace, "timestamp": str(int(time.time())), "left": left_to_agent}
    said = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": more}}
    try:
        if not file.exists() or not file.stat().st_size:
            file.write_text(json.dumps(said), encoding="utf-8")
            return left_to_agent
    except OSError as problem:
        sys.stderr.write(f"Could not write the failure to {file}: {problem}\n")
    return False
