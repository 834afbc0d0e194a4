"""Damages checkpoints of this plugin, for the conformance suite."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import fsspec


def damage(target: str) -> Iterator[str]:
    """Damage a checkpoint in several ways, and repair it in between."""
    yield from _archive(Path(target[6:])) if target.startswith("zip://") else _objects(target)


def _objects(target: str) -> Iterator[str]:
    options = json.loads(os.environ.get("ACCELERATE_FSSPEC_OPTIONS", "{}"))
    fs, root = fsspec.core.url_to_fs(target, **options)
    for path in fs.find(root):
        whole, name = fs.cat_file(path), path.rpartition("/")[2]
        fs.rm_file(path)
        yield f"without {name}"
        fs.pipe_file(path, whole[: len(whole) // 2])
        yield f"with half of {name}"
        fs.pipe_file(path, _changed(whole))
        yield f"with another byte in {name}"
        fs.pipe_file(path, whole)


def _archive(path: Path) -> Iterator[str]:
    whole = path.read_bytes()
    path.unlink()
    yield "that is gone"
    path.write_bytes(whole[: len(whole) // 2])
    yield "that is cut off"
    with zipfile.ZipFile(path.with_suffix(".whole"), "w") as copy:
        copy.writestr("nothing", b"")
    path.with_suffix(".whole").rename(path)
    yield "that is another archive"
    path.write_bytes(whole)
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    for damaged, data in held.items():
        for what, put in (("without", None), ("with another byte in", _changed(data))):
            with zipfile.ZipFile(path, "w") as archive:
                for name, its in {**held, damaged: put}.items():
                    if its is not None:
                        archive.writestr(name, its)
            yield f"{what} {damaged}"
    path.write_bytes(whole)


def _changed(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
