"""Report failed ranks: each traceback once, with rank, host and exit status."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate_core.plugin import env_flag
from accelerate_launch import late_ranks

#: If a failed rank has not exited after this many seconds, its traceback is shown.
_PATIENCE = 5.0

_SOME_COLLECTIVE = (
    "If this happened in a collective (gather, reduce, broadcast ...), the ranks passed tensors of "
    "different shapes or types to it."
)
_RUN_WITH_DEBUG = "To see which rank differs, run again with --debug (or ACCELERATE_DEBUG_MODE=1)."
#: One frame in the output of `faulthandler`, which lists the most recent call first.
_FRAME = re.compile(r'  File "([^"]+)", line (\d+) in (\S+)')
#: Matches gloo's errors for tensors that differ between ranks.
_MISMATCH = re.compile(r"EnforceNotMet|enforce fail at .*gloo")

#: Files whose frames lie between the start of a process and the launched function.
_CALLERS = (
    "torch/distributed/elastic/multiprocessing/errors/__init__.py",
    "accelerate_launch/functions.py",
    "accelerate_launch/notebook.py",
)

#: Suffix of the file in which a rank finds which other rank failed. `accelerate_checkpoint.preemption`
#: reads it, because otherwise it would take the signal that stops the rank for a preemption.
_FAILED_SUFFIX = ".failed"

#: The error file of each process. torch drops the name of a file that was not written.
_files: dict[int, str] = {}
#: Tracebacks that were shown before their ranks had ended.
_shown: list[str] = []


def remember(processes: Any) -> None:
    """Remember the error file of each of the agent's processes."""
    files = getattr(processes, "error_files", None) or {}
    for local_rank, pid in processes.pids().items():
        if files.get(local_rank):
            _files[pid] = str(files[local_rank])


def tell_others(processes: Any, first_rank: int) -> None:
    """Write to a file next to each error file which rank failed, before the others are stopped.

    Args:
        processes: torch's processes of this machine.
        first_rank: the rank of the first of them.
    """
    failures = getattr(processes, "_failures", None)
    if not failures:
        return
    failure = next(iter(failures.values()))
    text = f"Rank {first_rank + failure.local_rank} failed ({_how(failure)})."
    for file in processes.error_files.values():
        with suppress(OSError):
            Path(f"{file}{_FAILED_SUFFIX}").write_text(text, encoding="utf-8")


def held(processes: Any) -> str:
    """Describe ranks that failed a while ago but have not exited."""
    lines = []
    for local_rank, file in (getattr(processes, "error_files", None) or {}).items():
        try:
            late = time.time() - os.path.getmtime(file) > _PATIENCE
            message = json.loads(Path(file).read_text(encoding="utf-8"))["message"] if late else ""
        except (OSError, ValueError, KeyError):  # this rank has not failed
            continue
        trace = _left(message)
        if trace and trace not in _shown:
            _shown.append(trace)
            where = f"local rank {local_rank} on {socket.gethostname()}"
            lines += ["", f"Failure of {where} (the process has not exited yet):", trace]
    return "\n".join([*lines, ""]) if lines else ""


def describe(failures: Mapping[int, Any], *, brief: bool = False) -> tuple[str, int]:
    """Describe the failed ranks, the first failure last, and return the exit status for the agent.

    Args:
        failures: torch's `ProcessFailure` of each failed rank. It may have the attribute `host`, if the
            rank ran on another machine.
        brief: describe only the rank that failed first.
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
    host = getattr(failure, "host", socket.gethostname())
    lines += ["", f"Rank {rank} on {host} failed: {_how(failure)}."]
    said = _said(failure)
    above = f"{said} (traceback above)" if said else "See its output above."
    if failure.exitcode < 0 and (stacks := _stacks(failure)):
        above = stacks
    lines.append(above if trace in ("", *_shown) else trace)
    if _aborted_in_collective(failures) and not env_flag(os.environ, "ACCELERATE_DEBUG_MODE"):
        lines += [_collective(failures) or _SOME_COLLECTIVE, _RUN_WITH_DEBUG]
    lines += late_ranks.take_lines()
    log = _log(failure)
    lines.append(f"Log: {log}" if log else "Keep logs: --log_dir DIR")
    if alike:
        lines.append(f"Failed with the same traceback: rank {', '.join(alike)}.")
    if ended:
        lines.append(f"Stopped afterwards: rank {', '.join(ended)}.")
    _shown.clear()  # the ranks may be restarted
    return "\n".join(lines) + "\n", status if status > 0 else 128 - status


def caused_by_setting(failures: Mapping[int, Any]) -> bool:
    """Return whether the rank that failed first has an invalid setting, so a restart would fail as well."""
    if not failures:
        return False
    message = min(failures.values(), key=lambda one: one.timestamp).message
    more = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    return bool(more.get("setting"))


def _status(failure: Any) -> int:
    """Return the exit status of a rank, or minus the signal number if a signal killed it."""
    # A rank that recorded its exception was already exiting when the agent stopped all ranks.
    left = failure.exitcode == -signal.SIGTERM and _said(failure)
    return 1 if left else int(failure.exitcode)


def describe_function(failures: Mapping[int, Any]) -> str:
    """Describe the failed ranks of a launched function; the line that raised comes last.

    Frames of torch and of the launcher are left out.
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
    """Remove the frames of the launcher, which calls the function, from a traceback."""
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
    """Return whether a rank probably failed because ranks passed different tensors to a collective.

    In that case, the collectives library aborts the process from its own thread without a Python
    exception, or raises an error that does not mention the tensors.
    """
    return any(
        _status(one) == -signal.SIGABRT or _MISMATCH.search(_said(one)) for one in failures.values()
    )


def _stacks(failure: Any) -> str:
    """Return the thread stacks that `faulthandler` wrote for a rank killed by a signal."""
    file = Path(f"{_files.get(failure.pid) or failure.error_file}.stacks")
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.partition("\nExtension modules:")[0].rstrip()


def _collective(failures: Mapping[int, Any]) -> str:
    """Describe the collective in which the ranks aborted, "" if no stack shows one."""
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
                    f"This happened in {verb}, called at {file} line {line}: the ranks passed tensors "
                    "of different shapes or types to it."
                )
    return ""


def _how(failure: Any) -> str:
    status = _status(failure)
    if status >= 0:
        return f"exit status {status}, process {failure.pid}"
    name = signal.Signals(-status).name
    hint = ", possibly because memory ran out" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}; process {failure.pid}"


def _left(message: Any) -> str:
    """Return the traceback that a rank left for the agent to print, "" if it printed it itself."""
    said = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    return str(said["py_callstack"]).rstrip() if said.get("left") else ""


def _place(trace: str) -> list[str]:
    """Return the lines of a traceback that name files and line numbers."""
    return [line for line in trace.splitlines() if line.startswith('  File "')]


def _said(failure: Any) -> str:
    """Return the error that a rank recorded, without its traceback."""
    message = failure.message
    if isinstance(message, dict):
        return str(message.get("message", "")).rstrip()
    # If the rank recorded nothing, torch's message is only about the exit status.
    return "" if failure.exitcode < 0 or "traceback" in str(message) else str(message).rstrip()


def _log(failure: Any) -> str:
    """Return the rank's log file, which torch keeps in the folder of the error file, or ""."""
    written = _files.get(failure.pid) or failure.error_file or ""
    folder = Path(written).parent
    if str(folder) in ("", "."):
        return ""
    file = folder / "stderr.log"
    return str(file) if file.is_file() and os.access(file, os.R_OK) else ""
