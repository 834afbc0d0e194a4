"""The folder in which the ranks of a run on one machine leave files for `accelerate-core dump`."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shutil
import sys
import tempfile
import time
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


def create(rank: int) -> Path:
    """Create this run's folder on this machine, named after the process that started the ranks."""
    folder = _parent() / str(os.getppid())
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = {"pid": os.getpid(), "rank": rank, "script": sys.argv[0] if sys.argv else ""}
    (folder / f"rank{rank}.json").write_text(json.dumps(facts), encoding="utf-8")
    return folder


@dataclass
class Beat:
    """The last sign of life of a rank: seconds since the epoch, and its step."""

    time: float
    step: int


def write_beat(folder: Path, rank: int, step: int) -> None:
    """Write down that a rank is alive, for the other ranks on this machine."""
    (folder / f"rank{rank}.beat").write_text(f"{time.time()} {step}")


def read_beat(folder: Path, rank: int) -> Beat:
    """Return the last sign of life of a rank on this machine; if there is none, of now."""
    try:
        said, step = (folder / f"rank{rank}.beat").read_text().split()
    except (OSError, ValueError):  # none yet, or just being written
        return Beat(time.time(), 0)
    return Beat(float(said), int(step))


def leave(folder: Path, rank: int) -> None:
    """Remove this rank's files, and the folder when no rank's are left."""
    with contextlib.suppress(FileNotFoundError):  # another rank was the last one
        for file in folder.glob(f"rank{rank}.*"):
            file.unlink(missing_ok=True)
        if not any(folder.glob("rank*.json")):
            shutil.rmtree(folder, ignore_errors=True)


def running() -> dict[int, list[dict[str, Any]]]:
    """Return the facts of the living ranks on this machine, by the process that started them."""
    found = {}
    for folder in sorted(_parent().glob("[0-9]*")):
        ranks = [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]
        alive = [one for one in ranks if psutil.pid_exists(one["pid"])]
        if alive:
            found[int(folder.name)] = sorted(alive, key=lambda one: int(one["rank"]))
    return found


def folder_of(launcher: int) -> Path:
    """Return the folder of the run that this process started."""
    return _parent() / str(launcher)
