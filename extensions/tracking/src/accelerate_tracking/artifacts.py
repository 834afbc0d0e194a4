"""Copies of the files given to `log_artifact`: as they are at the call, until the run ends."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from pathlib import Path


class ArtifactCopies:
    """A folder of copies of this process alone, made when the first file comes.

    Args:
        directory: where the folder is made; None for the system's own place.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self._directory = None if directory is None else Path(directory).absolute()
        self._folder: Path | None = None
        self._count = 0

    def keep(self, path: str) -> str:
        """Return the path of a copy of a file or directory; its own where there is no room."""
        source = Path(path)
        try:
            if self._folder is None:
                if self._directory is not None:
                    self._directory.mkdir(parents=True, exist_ok=True)
                self._folder = Path(tempfile.mkdtemp(prefix=".artifacts-", dir=self._directory))
            self._count += 1
            target = self._folder / str(self._count) / source.name
            target.parent.mkdir()
            if source.is_dir():
                shutil.copytree(source, target)
            else:
                shutil.copy2(source, target)
        except (OSError, shutil.Error) as error:
            warnings.warn(
                f"log_artifact: {path} could not be copied ({error}); the trackers read it where "
                f"it lies, so keep it until the end of the run.",
                stacklevel=5,
            )
            return path
        return str(target)

    def clear(self) -> None:
        """Delete the copies."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
