"""The folder in which the ranks of a run on one machine leave files for `accelerate-core dump`."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil


def _parent() -> Path:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no such user in this container
        user = str(os.getuid())
    return Path(tempfile.gettempdir()) / f"accelerate-watch-{user}"


#: How many Accelerators of this process use the files of a rank. One that was deleted may leave late.
_users: Counter[tuple[Path, int]] = Counter()


def create(rank: int) -> Path:
    """Create this run's folder on this machine, named after the process that started the ranks."""
    folder = _parent() / str(os.getppid())
    facts = {
        "pid": os.getpid(),
        "started": _start_of(os.getpid()),
        "namespace": _namespace(),
        "rank": rank,
        "script": sys.argv[0] if sys.argv else "",
    }
    started = folder / f"rank{rank}.started"
    _users[folder, rank] += 1
    if not folder.parent.exists():  # the conformance suite counts each call of mkdir
        folder.parent.mkdir(mode=0o700, exist_ok=True)
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            started.write_text(json.dumps(facts), encoding="utf-8")
        except FileNotFoundError:  # a rank that ended removed the folder in this moment
            continue
        # The folder is not empty any more, so no other rank removes it. A file that is renamed is complete.
        started.rename(folder / f"rank{rank}.json")
        return folder


def has_rank(folder: Path, rank: int, pid: int) -> bool:
    """Return whether this process is a rank of the run on this machine that has this folder.

    The name of the host is not enough: containers and network namespaces may share it.
    """
    facts = _read(folder, rank)
    return facts.get("pid") == pid and facts.get("namespace") == _namespace()


def is_alive(folder: Path, rank: int) -> bool:
    """Return whether the process of a rank of this machine is still running."""
    return _is_alive(_read(folder, rank))


def _read(folder: Path, rank: int) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads(
            (folder / f"rank{rank}.json").read_text(encoding="utf-8")
        )
    except (OSError, ValueError):
        return {}
    return facts


def _is_alive(facts: dict[str, Any]) -> bool:
    """Return whether the process that wrote these facts runs, and is visible from this process.

    The system reuses the IDs of processes that ended, and each PID namespace has its own.
    """
    if facts.get("namespace") != _namespace():
        return False
    started = _start_of(facts["pid"])
    return started is not None and started == facts.get("started")


def _has_ended(facts: dict[str, Any]) -> bool:
    """Return whether the process that wrote these facts has ended, as far as this process can see."""
    return facts.get("namespace", _namespace()) == _namespace() and not _is_alive(facts)


def _namespace() -> int:
    """Return what identifies the PID namespace of this process; 0 where the system has none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _start_of(pid: int) -> float | None:
    """Return when a process started, in any unit; None if it has ended."""
    try:
        # psutil's time also depends on the clock, which may be set while the process runs.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else float(fields[19])
    except OSError:
        pass
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


@dataclass
class Beat:
    """The last sign of life of a rank: seconds since the epoch, and its step."""

    time: float
    step: int


def write_beat(folder: Path, rank: int, step: int) -> None:
    """Write down that a rank is alive, for the other ranks on this machine."""
    (folder / f"rank{rank}.beat").write_text(format_beat(step))


def read_beat(folder: Path, rank: int) -> Beat:
    """Return the last sign of life of a rank on this machine; if there is none, of now."""
    try:
        return parse_beat((folder / f"rank{rank}.beat").read_text())
    except (OSError, ValueError):  # none yet, or just being written
        return Beat(time.time(), 0)


def format_beat(step: int) -> str:
    """Return a sign of life of now, as text."""
    return f"{time.time()} {step}"


def parse_beat(text: str) -> Beat:
    """Read what `format_beat` returned."""
    said, step = text.split()
    return Beat(float(said), int(step))


def leave(folder: Path, rank: int) -> None:
    """Remove the files of this rank and of ranks that were killed, and the folder if it is empty.

    If a later Accelerator of this process uses the files, they stay.
    """
    _users[folder, rank] -= 1
    if _users[folder, rank] > 0:
        return
    with contextlib.suppress(FileNotFoundError):  # another rank has just removed the folder
        _remove(folder, rank)
    _tidy(folder)


def _tidy(folder: Path) -> None:
    """Remove the files of ranks that have ended, and the folder if it is empty then."""
    with contextlib.suppress(FileNotFoundError):  # another rank has just removed the folder
        for one in _facts(folder):
            if _has_ended(one):
                _remove(folder, one["rank"])
        if not _facts(folder):
            for report in [*folder.glob("report*.txt"), *folder.glob(".report*")]:
                report.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # other ranks are still there, or one of them has removed it
        folder.rmdir()


def _remove(folder: Path, rank: int) -> None:
    for file in folder.glob(f"rank{rank}.*"):
        file.unlink(missing_ok=True)


def _facts(folder: Path) -> list[dict[str, Any]]:
    """Return what the ranks in a folder wrote about themselves, in the order of ranks."""
    found = []
    with contextlib.suppress(FileNotFoundError):  # the last rank has just ended
        for file in list(folder.glob("rank*.json")):
            with contextlib.suppress(FileNotFoundError):  # the rank has just ended
                found.append(json.loads(file.read_text(encoding="utf-8")))
    return sorted(found, key=lambda one: int(one["rank"]))


def running() -> dict[int, list[dict[str, Any]]]:
    """Return the facts of the living ranks on this machine, by the process that started them.

    Files of runs that were killed are removed.
    """
    found = {}
    for folder in sorted(_parent().glob("[0-9]*")):
        _tidy(folder)
        alive = [one for one in _facts(folder) if _is_alive(one)]
        if alive:
            found[int(folder.name)] = alive
    return found


def folder_of(launcher: int) -> Path:
    """Return the folder of the run that this process started."""
    return _parent() / str(launcher)
