"""Stacks of this process's main thread, and of a process on this machine that does not answer."""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import psutil

#: Makes a rank of accelerate-launch's agent write its stacks to a file with this suffix.
_AGENTS_SIGNAL: signal.Signals | None = getattr(signal, "SIGVTALRM", None)
_AGENTS_SUFFIX = ".where"
#: Makes other ranks write them. No library is known to use this signal.
_OWN_SIGNAL: int | None = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None
#: What `request_report` writes.
REQUEST = b"accelerate-core dump\n"
#: Requests a report.
_REPORT_SIGNAL: signal.Signals | None = getattr(signal, "SIGUSR2", None)

#: Seconds in which a process writes its stacks.
_DUMP = 1.5
_SHOWN_LINES = 24
#: Functions between a call of a module and its `forward`, which say nothing.
_DULL = {"_wrapped_call_impl", "_call_impl"}

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


def own_stack() -> list[str]:
    """Return the stack of this process's main thread, the most recent call last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return _lines(_frames(frame))


def own_place() -> str:
    """Return the innermost line of the main thread outside of installed packages."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    places = [(file, line, name) for file, line, name in _frames(frame) if _is_users(file)]
    return "{} line {}, in {}".format(*places[-1]) if places else ""


def _is_users(file: str) -> bool:
    return not (file.startswith("<") or "site-packages" in file or "/accelerate_" in file) and (
        f"{os.sep}lib{os.sep}python" not in file
    )


def _frames(frame: FrameType | None) -> list[tuple[str, int, str]]:
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found[::-1]


def _lines(frames: list[tuple[str, int, str]]) -> list[str]:
    """Return the user's frames with their source, and only the ends of the calls into packages."""
    kept = [one for one in frames if one[2] not in _DULL and not one[0].startswith("<frozen")]
    users = [_is_users(file) for file, _, _ in kept]
    lines = []
    for at, (file, line, name) in enumerate(kept):
        inside = not users[at] and at > 0 and not users[at - 1] and not all(users[at + 1 :])
        if inside and at < len(kept) - 1:
            continue
        lines.append(f'  File "{file}", line {line}, in {name}')
        source = linecache.getline(file, line).strip()
        if users[at] and source:
            lines.append(f"    {source}")
    return lines[-_SHOWN_LINES:]


def register(folder: Path, rank: int) -> tuple[str, Path]:
    """Write the stacks on one signal, and notice another one, even while the main thread is in C.

    If the script or `preemption_signals` already handles SIGUSR2, it requests no report.

    Returns:
        The file for the stacks, "" if none, and the file that grows when a report is requested.
    """
    stacks = f"{os.environ.get('TORCHELASTIC_ERROR_FILE', '')}{_AGENTS_SUFFIX}"
    if not os.path.exists(stacks):
        stacks = ""
        if _OWN_SIGNAL is not None:
            stacks = str(folder / f"rank{rank}.stacks")
            faulthandler.register(_OWN_SIGNAL, open(stacks, "w"))  # noqa: SIM115
    requests = _requests(folder, rank)
    requests.write_bytes(b"")
    if _REPORT_SIGNAL is not None and signal.getsignal(_REPORT_SIGNAL) == signal.SIG_DFL:
        # A handler in Python would only run once the main thread returns from C. `request_report`
        # writes to the same file, so both append.
        faulthandler.register(_REPORT_SIGNAL, open(requests, "a"), all_threads=False)  # noqa: SIM115
    return stacks, requests


def request_report(folder: Path, rank: int) -> None:
    """Ask a rank to start a report, without a signal, which the script may use for something else.

    Raises:
        FileNotFoundError: the rank has ended.
    """
    file = os.open(_requests(folder, rank), os.O_WRONLY | os.O_APPEND)  # does not create the file
    try:
        os.write(file, REQUEST)
    finally:
        os.close(file)


def _requests(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.requests"


def describe_silent(pid: int, file: str) -> tuple[str, list[str]]:
    """Return why a process on this machine may not answer, and the stack of its main thread.

    Args:
        pid: its process ID.
        file: where it writes its stacks on the signal; "" if nowhere.
    """
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "has ended", []
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return f"is stopped by a signal (SIGSTOP?); `kill -CONT {pid}` continues it", []
    if status == psutil.STATUS_ZOMBIE:
        return "has ended", []
    stack = _stack_by_signal(pid, file) if file else []
    if not stack:
        return f"does not answer, and has state {status!r}", []
    return "does not answer: its main thread keeps Python's global lock", stack


def _stack_by_signal(pid: int, file: str) -> list[str]:
    number = _AGENTS_SIGNAL if file.endswith(_AGENTS_SUFFIX) else _OWN_SIGNAL
    assert number is not None
    path = Path(file)
    try:
        start = size = path.stat().st_size
        os.kill(pid, number)
    except OSError:
        return []
    until = time.monotonic() + _DUMP
    before = -1
    while time.monotonic() < until and not (size > start and size == before):
        time.sleep(0.05)
        before = size
        size = path.stat().st_size
    with path.open(encoding="utf-8", errors="replace") as opened:
        opened.seek(start)
        text = opened.read()
    threads = [_FRAME.findall(one) for one in re.split(r"^(?:Current t|T)hread ", text, flags=re.M)]
    main = next((one for one in threads if one and one[-1][2] == "<module>"), [])
    return _lines([(file, int(line), name) for file, line, name in main[::-1]])
