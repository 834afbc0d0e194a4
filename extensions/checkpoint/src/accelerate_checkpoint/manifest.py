"""`manifest.json`: what a checkpoint consists of, and whether that is still so.

Directories of Hugging Face Accelerate 1.x have none: they are recognised by their random states.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from accelerate_checkpoint import files
from accelerate_checkpoint.files import FileEntry, Progress, checksum
from accelerate_core.plugin import CheckpointError

#: Name of the file that makes the files it lists a checkpoint.
MANIFEST = "manifest.json"
KIND = "accelerate-core checkpoint"
FORMAT = 1

#: Stands in files of ours that another reader may take for its own.
MARK = "accelerate_core"


@dataclass
class Manifest:
    """The files of one checkpoint by their path in it, and what wrote them.

    `facts` are plain JSON: `saved_at` (seconds since 1970), `step` (optimizer steps), `epoch`,
    `world_size`, `mesh`, `written_by`, `objects`.

    `folder` is where the files are: "" beside the manifest, else the name of the save that wrote
    them, as in a store whose files cannot be moved.
    """

    files: dict[str, FileEntry]
    facts: dict[str, Any]
    folder: str = ""

    @property
    def content(self) -> dict[str, Any]:
        """All of it but its own checksum, as plain JSON."""
        return {
            "kind": KIND,
            "format": FORMAT,
            **self.facts,
            **({"folder": self.folder} if self.folder else {}),
            "files": {
                name: {"size": entry.size, "xxh3_128": entry.checksum}
                for name, entry in sorted(self.files.items())
            },
        }

    def render(self) -> str:
        """Return the text of the file, with a checksum of the rest as its last value."""
        body = json.dumps(self.content, indent=2, sort_keys=True)
        own = xxhash.xxh3_128_hexdigest(body.encode())
        rendered = {"content": self.content, "xxh3_128": own}
        return json.dumps(rendered, indent=2, sort_keys=True) + "\n"

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(entry.size for entry in self.files.values())


def read_manifest(directory: Path) -> Manifest:
    """Read and check `manifest.json`.

    Raises:
        CheckpointError: it is missing, damaged, of a newer format, or names files outside.
    """
    path = directory / MANIFEST
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return parse_manifest(text, str(path))


def parse_manifest(data: bytes, path: str) -> Manifest:
    """Return the manifest that a file holds.

    Args:
        path: of the file, for errors.

    Raises:
        CheckpointError: it is damaged, of a newer format, or names files outside.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        content = dict(json.loads(text)["content"])
        if content.pop("kind") != KIND:
            raise CheckpointError(f"{path} is no manifest of a checkpoint.")
        version = int(content.pop("format"))
        folder = str(content.pop("folder", ""))
        listed = {
            str(name): FileEntry(int(entry["size"]), str(entry["xxh3_128"]))
            for name, entry in content.pop("files").items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: it cannot be parsed.") from error
    if version > FORMAT:
        raise CheckpointError(
            f"{path} has format {version}; this accelerate-core reads up to {FORMAT}. Upgrade it."
        )
    manifest = Manifest(listed, content, folder)
    if manifest.render() != text:
        raise CheckpointError(f"{path} is damaged: its own checksum does not fit.")
    for name in (*listed, folder):
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts:
            raise CheckpointError(f"{path} names {name!r}, which is outside of the checkpoint.")
    return manifest


def problems(
    directory: Path,
    manifest: Manifest,
    *,
    contents: bool = True,
    part: tuple[int, int] = (0, 1),
    progress: Progress | None = None,
) -> list[str]:
    """Return what is wrong with the files, one line each, empty if nothing is.

    Args:
        directory: of the files: that of the manifest, or its `folder` there.
        contents: compare checksums too, not sizes only.
        part: index and count: every `count`-th file's checksum is compared, by size.
        progress: told the bytes that have been hashed.
    """
    found = []
    for name, entry in manifest.files.items():
        path = directory / name
        try:
            size = path.stat().st_size if path.is_file() else None
        except OSError as error:
            found.append(f"{path} cannot be read: {error}")
            continue
        if size is None:
            found.append(f"{path} is missing.")
        elif size != entry.size:
            found.append(f"{path} has {size} bytes, but {entry.size} were written.")
    if found or not contents:
        return found

    def compare(name: str) -> str:
        path = directory / name
        try:
            same = checksum(path, progress) == manifest.files[name]
        except OSError as error:
            return f"{path} cannot be read: {error}"
        return "" if same else f"{path} is damaged: its checksum is not the one in {MANIFEST}."

    index, count = part
    chosen = sorted(manifest.files, key=lambda name: manifest.files[name].size)[index::count]
    with ThreadPoolExecutor(2) as pool:
        return [line for line in pool.map(compare, chosen) if line]


def examine(
    directory: Path,
    *,
    contents: bool = True,
    part: tuple[int, int] = (0, 1),
    progress: Callable[[Manifest], Progress] | None = None,
) -> tuple[Manifest | None, list[str]]:
    """Return the manifest of a checkpoint and what is wrong with it; one of Accelerate's has none.

    Args:
        contents, part: see `problems`.
        progress: makes what `problems` tells its progress.
    """
    if not (directory / MANIFEST).exists():
        wrong = why_not_foreign(directory)
        return None, [wrong] if wrong else []
    try:
        manifest = read_manifest(directory)
    except CheckpointError as error:
        return None, [str(error)]
    told = None if progress is None else progress(manifest)
    where = directory / manifest.folder
    return manifest, problems(where, manifest, contents=contents, part=part, progress=told)


# --- directories of Hugging Face Accelerate --------------------------------------------------------


def why_not_foreign(directory: Path) -> str:
    """Return why a directory without a manifest cannot be loaded, "" if it is Accelerate's."""
    ours = (
        f"{directory / MANIFEST} is missing: the checkpoint is not whole, or was tampered with, "
        "and is not loaded."
    )
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                if MARK in (file.metadata() or {}):
                    return ours
        except (SafetensorError, OSError) as error:
            return f"{path} cannot be read: {files.first_line(error)}"
    states = directory / f"{files.RNG}_0.pkl"
    if not states.is_file():
        return (
            f"{directory} is no checkpoint: it has neither {MANIFEST} (ours) nor {states.name} "
            "(Hugging Face Accelerate's)."
        )
    try:
        found = files.read(states, allowed=numpy_globals())
    except CheckpointError as error:
        return str(error)
    if not isinstance(found, dict) or MARK in found or "random_state" not in found:
        return ours
    return ""


def numpy_globals() -> AbstractContextManager[Any]:
    """Allow NumPy's arrays of numbers while a file is read: Accelerate keeps generators as such."""
    try:
        import numpy
    except ImportError:
        return torch.serialization.safe_globals([])
    core: Any = getattr(numpy, "_core", None) or numpy.core
    rebuild = core.multiarray._reconstruct
    allowed: list[Any] = [numpy.ndarray, numpy.dtype, numpy.dtypes.UInt32DType]
    allowed += [(rebuild, f"numpy.{place}.multiarray._reconstruct") for place in ("core", "_core")]
    return torch.serialization.safe_globals(allowed)
