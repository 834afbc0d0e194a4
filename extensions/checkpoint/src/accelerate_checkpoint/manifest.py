"""`manifest.json`: what a checkpoint consists of, and whether that is still so."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from accelerate_checkpoint.files import FileEntry, checksum, write_text
from accelerate_core.errors import CheckpointError

__all__ = ["MANIFEST", "MARK", "Manifest", "problems", "read_manifest"]

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
    """

    files: dict[str, FileEntry] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def render(self) -> str:
        """Return the text of the file, with a checksum of the rest as its last value."""
        content: dict[str, Any] = {
            "kind": KIND,
            "format": FORMAT,
            **self.facts,
            "files": {
                name: {"size": entry.size, "xxh3_128": entry.checksum}
                for name, entry in sorted(self.files.items())
            },
        }
        body = json.dumps(content, indent=2, sort_keys=True)
        own = xxhash.xxh3_128_hexdigest(body.encode())
        return json.dumps({"content": content, "xxh3_128": own}, indent=2, sort_keys=True) + "\n"

    def write(self, directory: Path) -> None:
        """Write `manifest.json` and have it on the disk."""
        write_text(directory / MANIFEST, self.render())

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())


def read_manifest(directory: Path) -> Manifest:
    """Read and check `manifest.json`.

    Raises:
        CheckpointError: it is missing, damaged, of a newer format, or names files outside.
    """
    path = directory / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        content = dict(json.loads(text)["content"])
        if content.pop("kind") != KIND:
            raise CheckpointError(f"{path} is no manifest of a checkpoint.")
        version = int(content.pop("format"))
        files = {
            str(name): FileEntry(int(entry["size"]), str(entry["xxh3_128"]))
            for name, entry in content.pop("files").items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: it cannot be parsed.") from error
    if version > FORMAT:
        raise CheckpointError(
            f"{path} has format {version}; this accelerate-core reads up to {FORMAT}. Upgrade it."
        )
    manifest = Manifest(files, content)
    if manifest.render() != text:
        raise CheckpointError(f"{path} is damaged: its own checksum does not fit.")
    for name in files:
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts:
            raise CheckpointError(f"{path} names {name!r}, which is outside of the checkpoint.")
    return manifest


def problems(
    directory: Path,
    manifest: Manifest,
    *,
    contents: bool = True,
    names: Iterable[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Return what is wrong with the files, one line each, empty if nothing is.

    Args:
        contents: compare checksums too, not sizes only.
        names: the files whose checksums are compared; all by default.
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
    chosen = list(manifest.files if names is None else names)
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda name: _compare(directory, name, manifest.files, progress), chosen)
        return [line for line in results if line]


def _compare(
    directory: Path,
    name: str,
    files: Mapping[str, FileEntry],
    progress: Callable[[int], None] | None,
) -> str:
    path = directory / name
    try:
        same = checksum(path, progress) == files[name]
    except OSError as error:
        return f"{path} cannot be read: {error}"
    return "" if same else f"{path} is damaged: its checksum is not the one in {MANIFEST}."
