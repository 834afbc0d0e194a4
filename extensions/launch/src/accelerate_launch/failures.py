"""What is said when ranks have failed: each traceback once, and where they ran."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate_core.booleans import env_flag

#: Names the agent to its ranks, which then leave their tracebacks to it.
AGENT_VARIABLE = "ACCELERATE_AGENT_PID"
#: Seconds after which a rank that has failed and goes on is shown.
_PATIENCE = 5.0

_SOME_COLLECTIVE = (
    "If this happened in a collective (gather, reduce, broadcast ...), the ranks gave it tensors that "
    "do not fit together."
)
_RUN_WITH_DEBUG = "To see which rank differs, run again with --debug (or ACCELERATE_DEBUG_MODE=1)."
#: One frame of what `faulthandler` writes; the most recent call comes first.
_FRAME = re.compile(r'  File "([^"]+)", line (\d+) in (\S+)')
#: What gloo raises for it, when it raises.
_MISMATCH = re.compile(r"EnforceNotMet|enforce fail at .*gloo")

#: Files with the frames between a process that was started and the function that it runs.
_CALLERS = (
    "torch/distributed/elastic/multiprocessing/errors/__init__.py",
    "accelerate_launch/functions.py",
    "accelerate_launch/notebook.py",
)

#: Process -> the file it was to write its error into; torch forgets the name of one not written.
_files: dict[int, str] = {}
#: Tracebacks that were shown before their ranks had ended.
_shown: list[str] = []


def remember(processes: Any) -> None:
    """Note where each of the agent's processes keeps its error and its output."""
    files = getattr(processes, "error_files", None) or {}
    for local_rank, pid in processes.pids().items():
        if files.get(local_rank):
            _files[pid] = str(files[local_rank])


def held(processes: Any) -> str:
    """Return a text about ranks that have failed a while ago and do not end."""
    lines = []
    for local_rank, file in (getattr(processes, "error_files", None) or {}).items():
        try:
            late = time.time() - os.path.getmtime(file) > _PATIENCE
            message = json.loads(Path(file).read_text(encoding="utf-8"))["message"] if late else ""
        except (OSError, ValueError, KeyError):  # it has not failed
            continue
        trace = _left(message)
        if trace and trace not in _shown:
            _shown.append(trace)
            where = f"local rank {local_rank} on {socket.gethostname()}"
            lines += ["", f"The failure of {where}, whose process has not ended yet:", trace]
    return "\n".join([*lines, ""]) if lines else ""


def describe(failures: Mapping[int, Any], *, brief: bool = False) -> tuple[str, int]:
    """Return a text about the ranks that failed, the first one last, and the status to leave with.

    Args:
        failures: torch's `ProcessFailure` of each rank that did not end well.
        brief: leave out what became of the other ranks.
    """
    rank = min(failures, key=lambda one: failures[one].timestamp)
    failure = failures[rank]
    status = _status(failure)
    lines = []
    alike = []
    ended = []
    trace = _left(failure.message)
    shown = [*_shown, trace]
    for other in sorted(failures.keys() - {rank}) if not brief else ():
        its = _left(failures[other].message)
        if not its:
            ended.append(str(other))
        elif its in shown:
            alike.append(str(other))
        elif _place(its) in map(_place, shown):
            lines.append(f"Rank {other} failed at the same place: {_said(failures[other])}")
        else:
            shown.append(its)
            lines += ["", f"Rank {other} failed as well: {_how(failures[other])}.", its]
    lines += ["", f"Rank {rank} on {socket.gethostname()} failed: {_how(failure)}."]
    said = _said(failure)
    above = f"{said} (its traceback stands above)" if said else "What it printed stands above."
    if failure.exitcode < 0 and (stacks := _stacks(failure)):
        above = stacks
    lines.append(above if trace in ("", *_shown) else trace)
    if _aborted_in_collective(failures) and not env_flag(os.environ, "ACCELERATE_DEBUG_MODE"):
        lines += [_collective(failures) or _SOME_COLLECTIVE, _RUN_WITH_DEBUG]
    log = _log(failure)
    lines.append(f"Log: {log}" if log else "Keep logs: --log_dir DIR")
    if alike:
        lines.append(f"Failed alike: rank {', '.join(alike)}.")
    if ended:
        lines.append(f"Ended after it: rank {', '.join(ended)}.")
    _shown.clear()  # they may be started again
    return "\n".join(lines) + "\n", status if status > 0 else 128 - status


def _status(failure: Any) -> int:
    """Return how a rank ended; minus the signal's number if one killed it."""
    # A rank that wrote down its exception was on its way out when the agent ended all of them.
    left = failure.exitcode == -signal.SIGTERM and _said(failure)
    return 1 if left else int(failure.exitcode)


def describe_function(failures: Mapping[int, Any]) -> str:
    """Return a text about the ranks of a function that failed; the line that raised comes last.

    Frames of torch and of the launcher, which lie between the function and its process, are left out.
    """
    first = min(failures, key=lambda one: failures[one].timestamp)
    lines = []
    for rank in sorted(failures.keys() - {first}):
        lines.append(f"Rank {rank} failed as well: {_said(failures[rank])}")
    if _aborted_in_collective(failures) and not env_flag(os.environ, "ACCELERATE_DEBUG_MODE"):
        lines += [_SOME_COLLECTIVE, _RUN_WITH_DEBUG]
    lines.append(f"Rank {first} failed: {_how(failures[first])}.")
    message = failures[first].message
    more = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    trace = _without_launcher(str(more.get("py_callstack", "")))
    return "\n".join([*lines, trace] if trace else lines)


def _without_launcher(trace: str) -> str:
    """Leave the frames out that every function has above it when a launcher calls it."""
    kept: list[str] = []
    ours = False
    for line in trace.rstrip().splitlines():
        if line.startswith('  File "'):
            file = line.split('"')[1].replace(os.sep, "/")
            ours = file.endswith(_CALLERS)
        elif not line.startswith("    "):
            ours = False
        if not ours:
            kept.append(line)
    return "\n".join(kept)


def _aborted_in_collective(failures: Mapping[int, Any]) -> bool:
    """Tell whether a rank ended as ranks do whose tensors do not fit those of the others.

    The library of collectives then ends the process from a thread of its own, so that there is no
    Python exception, or raises an error that says nothing about the tensors.
    """
    return any(
        _status(one) == -signal.SIGABRT or _MISMATCH.search(_said(one)) for one in failures.values()
    )


def _stacks(failure: Any) -> str:
    """Return the stacks of the threads of a rank that a signal ended, as `faulthandler` wrote them."""
    file = Path(f"{_files.get(failure.pid) or failure.error_file}.stacks")
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.partition("\nExtension modules:")[0].rstrip()


def _collective(failures: Mapping[int, Any]) -> str:
    """Return a text about the collective in which the ranks aborted, "" if no stack shows one."""
    for failure in failures.values():
        for thread in _stacks(failure).split("\n\n"):
            frames = _FRAME.findall(thread)
            ours = ["/accelerate_core/" in file.replace(os.sep, "/") for file, _, _ in frames]
            calls = [at for at in range(1, len(frames)) if ours[at - 1] and not ours[at]]
            if calls and any(
                "distributed" in Path(file).parts for file, _, _ in frames[: calls[0]]
            ):
                verb, (file, line, _) = frames[calls[0] - 1][2], frames[calls[0]]
                return (
                    f"This happened in {verb}, called at {file} line {line}: the ranks gave it tensors "
                    "that do not fit together."
                )
    return ""


def _how(failure: Any) -> str:
    status = _status(failure)
    if status >= 0:
        return f"exit status {status}, process {failure.pid}"
    name = signal.Signals(-status).name
    hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}; process {failure.pid}"


def _left(message: Any) -> str:
    """Return the traceback that a rank has left to be shown, "" for one that has shown it."""
    said = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    return str(said["py_callstack"]).rstrip() if said.get("left") else ""


def _place(trace: str) -> list[str]:
    """Return the lines of the code that a traceback names."""
    return [line for line in trace.splitlines() if line.startswith('  File "')]


def _said(failure: Any) -> str:
    """Return the error that a rank wrote down, without its traceback."""
    message = failure.message
    if isinstance(message, dict):
        return str(message.get("message", "")).rstrip()
    # Of a rank that wrote nothing torch says no more than the status.
    return "" if failure.exitcode < 0 or "traceback" in str(message) else str(message).rstrip()


def _log(failure: Any) -> str:
    """Return the log file of the rank: torch keeps it beside the file with the error."""
    written = _files.get(failure.pid) or failure.error_file or ""
    folder = Path(written).parent
    if str(folder) in ("", "."):
        return ""
    file = folder / "stderr.log"
    return str(file) if file.is_file() and os.access(file, os.R_OK) else ""
