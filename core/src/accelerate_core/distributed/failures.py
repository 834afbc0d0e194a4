"""Record why a rank ended, so that the launcher shows the first failure and not its echo.

torchrun hands each worker a file (`TORCHELASTIC_ERROR_FILE`) for the exception it
dies of and prints the earliest one as the root cause, by whole seconds. Ranks that
fail *because* another one did usually fail within that same second; they wait here
until the launcher has seen the culprit and ends them.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

__all__ = [
    "ERROR_FILE_VARIABLE",
    "happened",
    "install",
    "is_echo",
    "is_failure",
    "record",
    "wait_for_culprit",
]

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"

#: Seconds an echo waits; the launcher polls ten times a second by default.
ECHO_WAIT = 3.0

_ECHOES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "application timeout caused pair closure",
    "remote process exited",
    "ncclremoteerror",
    "failed to recv, got 0 bytes",
)

_installed = False
_happened = False


def install(environ: Mapping[str, str] | None = None) -> None:
    """Notice an exception that ends this process, and record it where torchrun looks.

    A second call does nothing. Also switches `faulthandler` on: tensors that do
    not fit together abort the process in C++, without a Python traceback.
    """
    global _installed
    if _installed:
        return
    _installed = True
    file = (os.environ if environ is None else environ).get(ERROR_FILE_VARIABLE)
    if not faulthandler.is_enabled():
        try:
            faulthandler.enable()
        except (OSError, ValueError, AttributeError):
            pass  # a replaced stderr has no file descriptor
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _happened
        _happened = True
        if file and not isinstance(error, KeyboardInterrupt):
            # First, so that an echo is not even printed: the launcher ends this process meanwhile.
            wait_for_culprit(error)
            record(error, file)
        previous(kind, error, trace)
        sys.stderr.flush()

    sys.excepthook = hook


def happened() -> bool:
    """Tell whether an uncaught exception is ending this process."""
    return _happened


def is_failure(error: BaseException | None) -> bool:
    """Tell whether an exception means that the script failed: all but an exit with success."""
    if error is None or isinstance(error, (StopIteration, GeneratorExit)):
        return False
    return error.code not in (None, False, 0) if isinstance(error, SystemExit) else True


def is_echo(error: BaseException) -> bool:
    """Tell whether an error says no more than that another rank has gone."""
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(part in text for part in _ECHOES)


def wait_for_culprit(error: BaseException) -> None:
    """Give the launcher time to see the rank that failed first; it then ends this one."""
    if is_echo(error):
        time.sleep(ECHO_WAIT)


def record(error: BaseException, file: str | Path) -> None:
    """Write the exception in torchrun's form, unless something was written before."""
    path = Path(file)
    text = "".join(traceback.format_exception(error))
    said = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))},
    }
    try:
        if path.exists() and path.stat().st_size:
            return
        path.write_text(json.dumps({"message": said}), encoding="utf-8")
    except OSError as problem:
        sys.stderr.write(f"The failure could not be written to {path}: {problem}\n")
