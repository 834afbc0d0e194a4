"""`ObjectStoreCheckpointer`, which passes an `ObjectStorage` to `DirectoryCheckpointer`."""

from __future__ import annotations

import os
from typing import Any

from accelerate_checkpoint import DirectoryCheckpointer, is_url
from accelerate_core.plugin import Claim, Request
from accelerate_object_store.settings import ObjectStoreSettings
from accelerate_object_store.storage import ObjectStorage

__all__ = ["ObjectStoreCheckpointer"]


class ObjectStoreCheckpointer(DirectoryCheckpointer):
    """Keeps checkpoints in an object store. A URL as `project_dir` chooses it."""

    name = "object_store"
    api_version = (1, 0)
    Settings = ObjectStoreSettings

    @classmethod
    def detect(cls, request: Request) -> Claim | None:
        """Claim runs whose checkpoints go to a URL."""
        url = request.environ.get("ACCELERATE_OBJECT_STORE_URL")
        if url:
            return Claim(10, "environment variable ACCELERATE_OBJECT_STORE_URL")
        config = request.arguments.get("project_config")
        of_config = None if config is None else config.project_dir
        folder = of_config or request.arguments.get("project_dir")
        return Claim(10, "project_dir is a URL") if is_url(folder) else None

    def __init__(self, project: Any, signals: str | None, settings: ObjectStoreSettings) -> None:
        folder = None if project.project_dir is None else os.fspath(project.project_dir)
        url = settings.url or (folder if is_url(folder) else None)
        super().__init__(project, signals, ObjectStorage(url, settings), root=url)
