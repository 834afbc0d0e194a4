"""The journal: what was logged and is not yet safe with its tracker, on disk.

One line of JSON per entry in preallocated, memory-mapped segments: an append is a copy into
memory that belongs to the kernel. It survives the death of the process, costs no system call,
and does not release the interpreter to the threads that feed the libraries.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Journal", "Leftover", "delete_leftover", "hand_on_leftover", "read_leftover"]

SEGMENT_BYTES = 4 << 20

_NAME = re.compile(r"(?P<token>.+)-rank(?P<rank>\d+)-(?P<number>\d{6})\.journal")


class Journal:
    """Append-only; a segment is deleted once every tracker has what is in it.

    Args:
        directory: created if it is not there.
        token: tells the runs that share a directory apart.
        rank: each has files of its own.

    Raises:
        OSError: the directory cannot be written, or the disk is full.
    """

    def __init__(self, directory: Path, token: str, rank: int) -> None:
        self.directory, self.token, self.rank = directory, token, rank
        self._lock = threading.Lock()
        self._marks: dict[str, int] = {}
        self._last: dict[int, int] = {}  # segment -> the last entry in it
        self._number = -1
        self._view: mmap.mmap | None = None
        self._position = 0
        for left in range(100)[::-1]:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                self._next_segment(0)
                break
            except (FileNotFoundError, FileExistsError):
                if not left:
                    raise  # else another rank has ended, and removed the empty folder meanwhile

    def append(self, sequence: int, record: Mapping[str, Any]) -> None:
        """Keep one entry; `record` is what `json` can write.

        Raises:
            OSError: a new segment was needed and the disk is full.
            ValueError: it cannot be written as JSON.
        """
        line = _ENCODE({"n": sequence, **record}).encode() + b"\n"
        with self._lock:
            self._write(line)
            if sequence > self._last.get(self._number, -1):
                self._last[self._number] = sequence

    def mark(self, tracker: str, sequence: int) -> None:
        """Note that a tracker has every entry up to this one."""
        with self._lock:
            self._marks[tracker] = sequence
            self._write(_ENCODE({"have": {tracker: sequence}}).encode() + b"\n")
            self._drop_delivered()

    def watch(self, trackers: list[str]) -> None:
        """Say who has to have an entry before it may be deleted."""
        with self._lock:
            for name in trackers:
                self._marks.setdefault(name, -1)

    def close(self, delete: bool) -> None:
        """Close the files, and delete them if everything in them was delivered."""
        with self._lock:
            if self._view is not None:
                self._view.close()
                self._view = None
            if delete:
                # Found before any is deleted: a folder without them may be gone at any time.
                segments = _segments(self.directory, self.token, self.rank)
                for path in [*segments, *_pointers(self.directory, self.rank, self.token)]:
                    path.unlink(missing_ok=True)
                try:
                    self.directory.rmdir()
                except OSError:
                    pass  # another rank's or another run's files are there

    def _write(self, line: bytes) -> None:
        end = self._position + len(line)
        if self._view is None:
            raise OSError("the journal is closed")
        if end > len(self._view):
            self._next_segment(len(line))
            end = self._position + len(line)
        self._view[self._position : end] = line
        self._position = end

    def _next_segment(self, needed: int) -> None:
        number = self._number + 1
        path = self.directory / f"{self.token}-rank{self.rank}-{number:06d}.journal"
        head = _ENCODE({"have": self._marks}).encode() + b"\n"
        size = max(SEGMENT_BYTES, needed + len(head))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Blocks are reserved now: on a full disk this raises, a store into the map would kill.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size)
            else:
                os.write(descriptor, bytes(size))
            view = mmap.mmap(descriptor, size)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        if self._view is not None:
            self._view.close()
        self._number, self._view, self._position = number, view, 0
        self._write(head)

    def _drop_delivered(self) -> None:
        have = min(self._marks.values(), default=-1)
        for number in [n for n, last in self._last.items() if n < self._number and last <= have]:
            del self._last[number]
            name = f"{self.token}-rank{self.rank}-{number:06d}.journal"
            (self.directory / name).unlink(missing_ok=True)


@dataclass
class Leftover:
    """What an ended process left: entries in order, and how far each tracker had got."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    have: dict[str, int] = field(default_factory=dict)

    def missing(self, tracker: str) -> Iterator[dict[str, Any]]:
        """Return the entries a tracker never got."""
        have = self.have.get(tracker, -1)
        return (entry for entry in self.entries if entry["n"] > have)


def read_leftover(directory: Path, token: str, rank: int) -> Leftover:
    """Read what a run left; empty if it left nothing. A torn last line is ignored."""
    left = Leftover()
    token = _follow(directory, token, rank)
    entries: dict[int, dict[str, Any]] = {}
    for path in _segments(directory, token, rank):
        for line in path.read_bytes().split(b"\0", 1)[0].split(b"\n"):
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if "have" in record:
                left.have.update(record["have"])
            elif "n" in record:
                entries[record["n"]] = record
    left.entries = [entries[number] for number in sorted(entries)]
    return left


def hand_on_leftover(directory: Path, token: str, rank: int, successor: str) -> None:
    """Delete what a run left, now that it is in the journal of another one in that directory.

    A pointer stays: should the successor be killed too, the checkpoint still names this run.
    """
    token = _follow(directory, token, rank)
    if token == successor:
        return
    pointer = directory / f"{token}-rank{rank}.next"
    pointer.write_text(successor, encoding="utf-8")
    delete_leftover(directory, token, rank)


def delete_leftover(directory: Path, token: str, rank: int) -> None:
    """Delete what a run left."""
    for path in _segments(directory, token, rank):
        path.unlink(missing_ok=True)


def _follow(directory: Path, token: str, rank: int) -> str:
    """Return the run whose journal has, by now, what this one left."""
    seen = {token}
    while True:
        try:
            following = (directory / f"{token}-rank{rank}.next").read_text(encoding="utf-8").strip()
        except OSError:
            return token
        if not following or following in seen:
            return token
        seen.add(following)
        token = following


def _pointers(directory: Path, rank: int, token: str) -> list[Path]:
    """Return the pointers that lead to a run."""
    ends = {
        path: _follow(directory, path.name.rpartition("-rank")[0], rank)
        for path in _matching(directory, f"*-rank{rank}.next")
    }
    return [path for path, end in ends.items() if end == token]


def _segments(directory: Path, token: str, rank: int) -> list[Path]:
    found = []
    for path in _matching(directory, "*.journal"):
        match = _NAME.fullmatch(path.name)
        if match and match["token"] == token and int(match["rank"]) == rank:
            found.append(path)
    return sorted(found)


def _matching(directory: Path, pattern: str) -> list[Path]:
    try:
        return list(directory.glob(pattern))
    except FileNotFoundError:  # removed while it was listed
        return []


_ENCODE = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True, check_circular=False).encode
