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
from itertools import pairwise
from pathlib import Path
from types import TracebackType

from accelerate_core.errors import is_ours
from accelerate_core.plugin import (
    AccelerateError,
    ConfigurationError,
    PluginError,
    of_the_user,
    parse_bool,
)
from accelerate_launch.attribute_hint import add_attribute_hint

#: Holds the agent's process ID. Ranks that see it let the agent print their tracebacks.
AGENT_VARIABLE = "ACCELERATE_AGENT_PID"

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


def install() -> None:
    """Record uncaught exceptions in the file that torchrun reads. Calling this again has no effect.

    This also enables `faulthandler`, because mismatched tensors in a collective can abort the process in
    C++ without a Python traceback. On SIGUSR2, the process prints its stacks, unless the script uses it.
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
    report = getattr(signal, "SIGUSR2", None)
    if report is not None and signal.getsignal(report) == signal.SIG_DFL:
        # It would end the process by default. In a run of several processes, accelerate-watch then uses
        # it for a report about all ranks.
        with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
            faulthandler.register(report, sys.stderr)
    # atexit callbacks run after Python waits for threads. These callbacks, if Python has them, run before.
    # The first in the list runs last, after thread pools were asked to end.
    getattr(threading, "_threading_atexits", []).insert(0, _name_threads)
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ours = previous is sys.__excepthook__ and not _is_debugged()
        if isinstance(error, KeyboardInterrupt) and ours:
            _print_interrupt(error)
            return
        shorten(error)
        add_attribute_hint(error)
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if file and not isinstance(error, KeyboardInterrupt):
            # Wait before printing: the launcher stops an echo meanwhile, so it is never printed.
            wait_for_culprit(error)
            if record(error, Path(file), _agent_is_parent() and previous is sys.__excepthook__):
                return
        previous(kind, error, trace)
        sys.stderr.flush()

    sys.excepthook = hook


def _is_debugged() -> bool:
    """Return whether someone may want the traceback of a Ctrl-C: in a debugger or a prompt."""
    if hasattr(sys, "ps1") or sys.flags.interactive or sys.gettrace() is not None:
        return True
    monitoring = getattr(sys, "monitoring", None)  # debuggers use it since Python 3.12
    if monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None:
        return True
    return "pydevd" in sys.modules or bool(parse_bool(os.environ.get("ACCELERATE_DEBUG_MODE", "")))


def _print_interrupt(error: KeyboardInterrupt) -> None:
    """Print where Ctrl-C interrupted the main process, and what plugins have noted on the exception."""
    if os.environ.get("RANK", "0") != "0":
        return
    users = [entry for entry in _entries(error) if of_the_user(entry.tb_frame)]
    where = ""
    if users:
        where = f" at {users[-1].tb_frame.f_code.co_filename} line {users[-1].tb_lineno}"
    lines = [f"Interrupted by Ctrl-C{where}.", *getattr(error, "__notes__", ())]
    sys.stderr.write("\n" + "\n".join(lines) + "\n")
    sys.stderr.flush()


def _agent_is_parent() -> bool:
    return os.environ.get(AGENT_VARIABLE) == str(os.getppid())


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


def wait_for_culprit(error: BaseException) -> None:
    """If this failure is an echo, give the launcher time to detect the rank that failed first."""
    if isinstance(error, RuntimeError | OSError) and _ECHO.search(str(error)):
        time.sleep(_ECHO_WAIT)


def record(error: BaseException, file: Path, left_to_agent: bool) -> bool:
    """Write the exception in torchrun's format, unless the file already has content.

    Returns whether our agent will show it. The agent shows each traceback once.
    """
    trace = "".join(traceback.format_exception(error))
    more: dict[str, object] = {
        "py_callstack": trace,
        "timestamp": str(int(time.time())),
        "left": left_to_agent,
        "setting": isinstance(error, ConfigurationError),
    }
    said = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": more}}
    try:
        if not file.exists() or not file.stat().st_size:
            file.write_text(json.dumps(said), encoding="utf-8")
            return left_to_agent
    except OSError as problem:
        sys.stderr.write(f"Could not write the failure to {file}: {problem}\n")
    return False


# --- tracebacks without our own frames ---------------------------------------------------------


def shorten(error: BaseException) -> None:
    """Remove our frames from a traceback, so that the last line shown is the user's.

    For our errors, the traceback ends at the line that called us. For errors in the user's code, such as in
    a dataset that we read, it looks as it would without us. Any other error may be our bug and keeps all
    frames. In debug mode (`ACCELERATE_DEBUG_MODE`, `launch --debug`), nothing is removed.
    """
    if parse_bool(os.environ.get("ACCELERATE_DEBUG_MODE", "")):
        return
    entries = _entries(error)
    users = [at for at, entry in enumerate(entries) if of_the_user(entry.tb_frame)]
    if not users:
        return
    if isinstance(error, AccelerateError):
        del entries[users[-1] + 1 :]
        _drop_internal_cause(error)
    elif users[-1] != len(entries) - 1:
        return
    kept = [entry for entry in entries if not is_ours(entry.tb_frame)]
    for entry, following in pairwise(kept):
        entry.tb_next = following
    kept[-1].tb_next = None
    error.__traceback__ = kept[0]


def _entries(error: BaseException) -> list[TracebackType]:
    entries = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    return entries


def _drop_internal_cause(error: AccelerateError) -> None:
    """Hide the exception that we turned into this one, unless the user's or a plugin's code raised it."""
    cause = error.__cause__ or error.__context__
    if cause is None or isinstance(error, PluginError):
        return
    entries = _entries(cause)
    caught_by_us = not entries or is_ours(entries[0].tb_frame)
    if caught_by_us and not (entries and of_the_user(entries[-1].tb_frame)):
        error.__cause__ = None  # this also hides the context
    else:
        shorten(cause)
