"""The simplest store: files in a folder, where one file can be replaced but folders cannot move."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from accelerate_checkpoint import MANIFEST, DirectoryCheckpointer, Storage


class PlainStorage(Storage):
    def locate(self, target: Any, *, saving: bool = False) -> str:
        return os.path.abspath(target)

    def list(self, place: str, folder: str = "") -> dict[str, int | None]:
        path = Path(place, folder)
        found = path.iterdir() if path.is_dir() else ()
        return {one.name: None if one.is_dir() else one.stat().st_size for one in found}

    def read(self, place: str, name: str) -> bytes:
        return Path(place, name).read_bytes()

    def write(self, place: str, name: str, source: Path, progress: Any) -> None:
        Path(place, name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, Path(place, name))
        progress(source.stat().st_size)

    def publish(self, place: str, save: str, manifest: bytes) -> None:
        part = Path(place, f"{MANIFEST}.part")
        part.write_bytes(manifest)
        part.rename(Path(place, MANIFEST))

    def fetch(self, place: str, name: str, start: int, stop: int) -> bytes:
        with Path(place, name).open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def delete(self, place: str, name: str = "") -> None:
        path = Path(place, name)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


class PlainCheckpointer(DirectoryCheckpointer):
    name = "plain"
    api_version = (1, 0)

    def __init__(self, project: Any, signals: str | None) -> None:
        super().__init__(project, signals, PlainStorage())
