"""What is said when a rank has failed: its own traceback, and where it ran."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

#: Process -> the file it was to write its error into; torch forgets the name of one not written.
_files: dict[int, str] = {}


def remember(processes: Any) -> None:
    """Note where each of the agent's processes keeps its error and its output."""
    files = getattr(processes, "error_files", None) or {}
    for local_rank, pid in processes.pids().items():
        if files.get(local_rank):
            _files[pid] = str(files[local_rank])


def describe(error: Any, *, brief: bool = False) -> tuple[str, int]:
    """Return a text about the rank that failed first, and the status to leave with.

    Args:
        error: torch's `ChildFailedError`.
        brief: leave out what became of the other ranks.
    """
    rank, failure = error.get_first_failure()
    status = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    lines = ["", f"Rank {rank} on {socket.gethostname()} failed: {_how(failure)}."]
    log = _log(failure)
    lines.append(_trace(failure) or _last_words(log) or "What it printed stands above.")
    lines.append(f"Log: {log}" if log else "Keep logs: --log_dir DIR")
    others = sorted(other for other in error.failures if other != rank)
    if others and not brief:
        lines.append(f"Ended after it: rank {', '.join(map(str, others))}.")
    return "\n".join(lines) + "\n", status


def _how(failure: Any) -> str:
    if failure.exitcode >= 0:
        return f"exit status {failure.exitcode}, process {failure.pid}"
    name = signal.Signals(-failure.exitcode).name
    hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}; process {failure.pid}"


def _trace(failure: Any) -> str:
    """Return the traceback that the rank wrote down, else what torch knows."""
    message = failure.message
    if isinstance(message, dict):
        text = message.get("extraInfo", {}).get("py_callstack") or message.get("message", "")
        return str(text).rstrip()
    # Of a rank that wrote nothing torch says no more than the status, which stands above.
    return "" if failure.exitcode < 0 or "traceback" in str(message) else str(message).rstrip()


def _log(failure: Any) -> str:
    """Return the log file of the rank: torch keeps it beside the file with the error."""
    written = _files.get(failure.pid) or failure.error_file or ""
    folder = Path(written).parent
    if str(folder) in ("", "."):
        return ""
    file = folder / "stderr.log"
    return str(file) if file.is_file() and os.access(file, os.R_OK) else ""


def _last_words(log: str) -> str:
    """Return the last traceback in a rank's log."""
    if not log:
        return ""
    text = Path(log).read_text(encoding="utf-8", errors="replace")
    at = text.rfind("Traceback (most recent call last):")
    if at < 0:  # a SyntaxError has none
        at = text.rfind('  File "')
    return text[at:].rstrip() if at >= 0 else ""
