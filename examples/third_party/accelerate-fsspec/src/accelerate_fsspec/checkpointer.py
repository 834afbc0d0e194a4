"""`FsspecCheckpointer`, which passes an fsspec storage to `DirectoryCheckpointer`."""

from __future__ import annotations

from typing import Any

from accelerate_checkpoint import DirectoryCheckpointer
from accelerate_fsspec.settings import FsspecSettings
from accelerate_fsspec.storage import FsspecStorage

__all__ = ["FsspecCheckpointer"]


class FsspecCheckpointer(DirectoryCheckpointer):
    """Keeps checkpoints on any fsspec file system."""

    name = "fsspec"
    api_version = (1, 0)
    Settings = FsspecSettings

    def __init__(self, project: Any, signals: str | None, settings: FsspecSettings) -> None:
        storage = FsspecStorage(settings.url, settings.options)
        super().__init__(project, signals, storage, root=settings.url)
