"""The folder in which the ranks of a run on one machine leave files for `accelerate-core dump`."""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import os
import stat
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from accelerate_core.plugin import PluginError

logger = logging.getLogger(__name__)


#: How many names are tried in the temporary directory, in case another user has taken the first ones.
_NAMES = 10


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no such user in this container
        return str(os.getuid())


def _candidates(base: str) -> list[Path]:
    """Return the names that the folder of all runs may have in a directory, in order."""
    name = f"accelerate-watch-{_user()}"
    return [Path(base, name), *(Path(base, f"{name}-{number}") for number in range(2, _NAMES + 1))]


def _is_ours(folder: Path) -> bool:
    """Return whether a path is a directory, not a link, that only this user can write to.

    If other users can write to a directory of this user, they no longer can afterwards.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return False
    if os.name == "nt":
        return True
    if status.st_uid != os.getuid():
        return False
    if status.st_mode & 0o077:
        folder.chmod(0o700)
    return True


def _make_own(folder: Path) -> bool:
    """Create a directory for this user only; return False if the name belongs to somebody else."""
    if not os.path.lexists(folder):  # the conformance suite counts each call of mkdir
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    return _is_ours(folder)


def _parent() -> Path:
    """Create the folder of all runs of this user.

    It is below `XDG_RUNTIME_DIR` if that is set, and otherwise in the temporary directory. There, other
    users may have created a folder or link of that name, so it is only used if it belongs to this user.

    Raises:
        PluginError: other users have taken all names.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    base = runtime if os.access(runtime, os.W_OK) else tempfile.gettempdir()
    candidates = _candidates(base)
    for folder in candidates:
        if _make_own(folder):
            return folder
    raise PluginError(
        f"accelerate-watch cannot create a folder in {base}, because other users have created "
        f"{candidates[0].name} and the names after it. Set XDG_RUNTIME_DIR to a directory of your own."
    )


def _parents() -> list[Path]:
    """Return the folders of all runs of this user that exist.

    The variables may differ between the run and `accelerate-core dump`.
    """
    bases = [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir()]
    if os.name != "nt":
        bases.insert(1, f"/run/user/{os.getuid()}")
    parents: list[Path] = []
    for base in dict.fromkeys(filter(None, bases)):
        for folder in _candidates(base):
            if os.path.lexists(folder) and _is_ours(folder):
                parents.append(folder)
    return parents


def write(file: Path, text: str) -> None:
    """Write a file of this user, replacing its content. A link of that name is not followed.

    Raises:
        OSError: it is a link or cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
    with os.fdopen(os.open(file, flags, 0o600), "w", encoding="utf-8") as opened:
        opened.write(text)


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
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            write(started, json.dumps(facts))
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
    """Return what a rank wrote about itself; {} if it has ended or the file is damaged."""
    return _parse(folder / f"rank{rank}.json") or {}


def _parse(file: Path) -> dict[str, Any] | None:
    """Return the facts in a file; None if it is missing or damaged."""
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    is_valid = isinstance(facts, dict) and all(
        isinstance(facts.get(name), kind)
        for name, kind in (("pid", int), ("rank", int), ("script", str))
    )
    return facts if is_valid else None


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
    write(folder / f"rank{rank}.beat", format_beat(step))


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
        for facts in _facts(folder):
            if _has_ended(facts):
                _remove(folder, facts["rank"])
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
    ranks = []
    for file in folder.glob("rank*.json"):
        facts = _parse(file)
        if facts is not None:
            ranks.append(facts)
        elif file.exists():  # otherwise the rank has just ended
            logger.warning("%s is damaged and ignored. Delete it.", file)
    return sorted(ranks, key=lambda facts: int(facts["rank"]))


def running() -> dict[int, list[dict[str, Any]]]:
    """Return the facts of the living ranks on this machine, by the process that started them.

    Files of runs that were killed are removed.
    """
    jobs = {}
    for folder in _run_folders():
        _tidy(folder)
        alive = [facts for facts in _facts(folder) if _is_alive(facts)]
        if alive:
            jobs[int(folder.name)] = alive
    return jobs


def _run_folders() -> list[Path]:
    folders = [folder for parent in _parents() for folder in parent.iterdir()]
    return sorted(folder for folder in folders if folder.name.isdecimal() and folder.is_dir())


def folder_of(launcher: int) -> Path:
    """Return the folder of the run that this process started.

    Raises:
        FileNotFoundError: it has no running rank.
    """
    for folder in _run_folders():
        if folder.name == str(launcher):
            return folder
    raise FileNotFoundError(f"no rank of process {launcher} is running")
