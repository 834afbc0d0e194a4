"""Print the output of the ranks, and write it to files."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from string import Template
from typing import TextIO


class Output:
    """Prints each line with the number of its rank, and writes it to `log_dir` if there is one."""

    def __init__(self, prefix: str, log_dir: str | None, tee: str) -> None:
        self._prefix = Template(prefix)
        self._log_dir = Path(log_dir) if log_dir else None
        kept = {"0": (), "1": ("stdout",), "2": ("stderr",), "3": ("stdout", "stderr")}
        self._kept = kept[tee]
        self._files: dict[tuple[int, str], TextIO] = {}
        self._folder: Path | None = None

    def begin(self, attempt: int) -> None:
        """Open a new folder for an attempt."""
        self.close()
        if self._log_dir is not None:
            self._folder = self._log_dir / f"attempt_{attempt}"

    def folder_of(self, rank: int) -> Path | None:
        """Return the folder of a rank's files, None without `log_dir`."""
        return None if self._folder is None else self._folder / str(rank)

    def show(self, rank: int, local_rank: int, lines: Iterable[tuple[str, str]]) -> None:
        """Print lines to the stream from which they came."""
        prefix = self._prefix.safe_substitute(rank=rank, local_rank=local_rank, role_name="rank")
        streams = set()
        for name, line in lines:
            stream = sys.stdout if name == "stdout" else sys.stderr
            stream.write(f"{prefix}{line}\n")
            streams.add(stream)
            if name in self._kept and self._folder is not None:
                self._file(rank, name).write(f"{line}\n")
        for stream in streams:
            stream.flush()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, rank: int, name: str) -> TextIO:
        if (rank, name) not in self._files:
            folder = self.folder_of(rank)
            assert folder is not None
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{name}.log"
            self._files[rank, name] = path.open("w", encoding="utf-8", buffering=1)
        return self._files[rank, name]
