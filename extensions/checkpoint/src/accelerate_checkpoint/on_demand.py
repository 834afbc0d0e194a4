"""Fetch the files of a stored checkpoint when they are read, if they were not fetched before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

#: Directory of a fetched checkpoint -> fetches one of its files, by its name in the manifest.
_sources: dict[Path, Callable[[str], None]] = {}


def fetched_on_demand(root: Path, fetch: Callable[[str], None]) -> None:
    """Call `fetch` with the name of each file below `root` that is read later and missing."""
    _sources[root] = fetch


def forget(folder: Path) -> None:
    """Fetch nothing more into a folder."""
    for root in [one for one in _sources if one.is_relative_to(folder)]:
        del _sources[root]


def fetch_missing(directory: Path, names: Iterable[str]) -> None:
    """Fetch those of these files that are missing, if the directory is in a fetched checkpoint.

    Raises:
        CheckpointError: a file is damaged, or cannot be read.
    """
    for root, fetch in _sources.items():
        if directory.is_relative_to(root):
            for name in names:
                if not (directory / name).exists():
                    fetch((directory / name).relative_to(root).as_posix())
