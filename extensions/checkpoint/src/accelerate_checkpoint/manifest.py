"""`manifest.json`: lists the files of a checkpoint, to find missing and damaged ones.

Checkpoints of Hugging Face Accelerate 1.x have no manifest. They are recognised by their file of
random states.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
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
from accelerate_core.plugin import CheckpointError, is_count, parse_json, read_limited

#: Name of the manifest. A checkpoint exists once this file does.
MANIFEST = "manifest.json"
KIND = "accelerate-core checkpoint"
FORMAT = 1

#: More ranks than any run has. Loops over them stay short.
MOST_RANKS = 1 << 20

#: Marks our files in formats that other libraries write too.
MARK = "accelerate_core"


@dataclass
class Manifest:
    """The files of one checkpoint, by their path in it, and facts about the run that wrote them.

    Attributes:
        files: size and checksum of each file.
        facts: plain JSON: `saved_at` (seconds since 1970), `step` (optimizer steps), `epoch`,
            `world_size`, `mesh`, `written_by`, `objects`.
        folder: where the files are: "" means next to the manifest. In stores that cannot move
            files, it is the name of the save that wrote them.
    """

    files: dict[str, FileEntry]
    facts: dict[str, Any]
    folder: str = ""

    @property
    def _content_without_files(self) -> dict[str, Any]:
        folder = {"folder": self.folder} if self.folder else {}
        return {"kind": KIND, "format": FORMAT, **self.facts, **folder}

    @property
    def content(self) -> dict[str, Any]:
        """The manifest as plain JSON, without its own checksum."""
        files = {
            name: {"size": entry.size, "xxh3_128": entry.checksum}
            for name, entry in sorted(self.files.items())
        }
        return {**self._content_without_files, "files": files}

    def render(self) -> str:
        """Return the text of the file. Its last value is a checksum of the rest."""
        # json indents in Python, which takes seconds for the files of thousands of ranks. So the list of
        # files, which has the form that json would give it, is put into the text of the rest.
        place = "FILES"
        entries = [
            f'{json.dumps(name)}: {{\n      "size": {entry.size},\n'
            f'      "xxh3_128": {json.dumps(entry.checksum)}\n    }}'
            for name, entry in sorted(self.files.items())
        ]
        listed = "{\n    " + ",\n    ".join(entries) + "\n  }" if entries else "{}"
        rest = json.dumps(
            {**self._content_without_files, "files": [place]}, indent=2, sort_keys=True
        )
        body = rest.replace(f'"files": [\n    "{place}"\n  ]', f'"files": {listed}')
        own = xxhash.xxh3_128_hexdigest(body.encode())
        nested = body.replace("\n", "\n  ")
        return f'{{\n  "content": {nested},\n  "xxh3_128": "{own}"\n}}\n'

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(entry.size for entry in self.files.values())


def read_manifest(directory: Path) -> Manifest:
    """Read and check `manifest.json`.

    Raises:
        CheckpointError: it is missing, damaged or of a newer format, or names a file outside the
            checkpoint.
    """
    path = directory / MANIFEST
    try:
        text = read_limited(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return parse_manifest(text, str(path))


def parse_manifest(data: bytes, path: str) -> Manifest:
    """Parse and check the content of a manifest.

    Args:
        path: path of the file, for errors.

    Raises:
        CheckpointError: it is damaged or of a newer format, or names a file outside the
            checkpoint.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        content = dict(parse_json(text)["content"])
        if content.pop("kind") != KIND:
            raise CheckpointError(f"{path} is not the manifest of a checkpoint.")
        version = content.pop("format")
        folder = str(content.pop("folder", ""))
        listed = {
            name: FileEntry(entry["size"], str(entry["xxh3_128"]))
            for name, entry in content.pop("files").items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: it cannot be parsed.") from error
    if not is_count(version):
        raise CheckpointError(f"{path} is damaged: its format is not a number.")
    if version > FORMAT:
        raise CheckpointError(
            f"{path} has format {version}, but this version of accelerate-checkpoint only reads "
            f"up to format {FORMAT}. Upgrade it."
        )
    for name, entry in listed.items():
        if not is_count(entry.size):
            raise CheckpointError(f"{path} is damaged: the size of {name!r} is not a number.")
    _check_facts(path, content)
    manifest = Manifest(listed, content, folder)
    try:
        same = manifest.render() == text
    except RecursionError:  # writing JSON needs more of the stack than reading it
        same = False
    if not same:
        raise CheckpointError(f"{path} is damaged: its checksum does not match its content.")
    for name in (*listed, folder):
        try:
            inner_name(name)
        except ValueError as error:
            raise CheckpointError(f"{path} names {error}") from error
    return manifest


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < 250e9  # dates end in the year 9999


def _are_counts(value: object) -> bool:
    return isinstance(value, dict) and all(is_count(count, MOST_RANKS) for count in value.values())


def _are_packages(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    plugins = value.get("plugins", [])
    names = ("name", "distribution", "version", "kind")
    return isinstance(plugins, list) and all(
        isinstance(plugin, dict) and plugin.keys() >= set(names) for plugin in plugins
    )


#: What each fact must be, and the test of it. Other facts are only shown.
_FACTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "saved_at": ("seconds since 1970", _is_seconds),
    "step": ("a count", is_count),
    "epoch": ("a count", is_count),
    "world_size": (
        f"a number of ranks from 1 to {MOST_RANKS}",
        lambda value: is_count(value, MOST_RANKS) and value > 0,
    ),
    "mesh": ("null or counts by name", lambda value: value is None or _are_counts(value)),
    "objects": ("counts by name", _are_counts),
    "optimizers": (
        "a list of names",
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    ),
    "written_by": ("versions by package", _are_packages),
}


def _check_facts(path: str, facts: Mapping[str, Any]) -> None:
    for key, (meaning, is_valid) in _FACTS.items():
        if key in facts and not is_valid(facts[key]):
            shown = repr(facts[key])[:80]
            raise CheckpointError(f"{path} is damaged: {key!r} must be {meaning}, not {shown}.")


def inner_name(name: str) -> str:
    """Return the name of a file in a checkpoint, after checking that it stays inside.

    Raises:
        ValueError: it is absolute, contains "..", or cannot be the name of a file.
    """
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise ValueError(f"{name!r}, which cannot be the name of a file.")
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts:
        raise ValueError(f"{name!r}, which is outside the checkpoint.")
    return name


def problems(
    directory: Path,
    manifest: Manifest,
    *,
    contents: bool = True,
    part: tuple[int, int] = (0, 1),
    progress: Progress | None = None,
) -> list[str]:
    """Return the problems with the files of a checkpoint, one line per file.

    Args:
        directory: the directory that holds the files.
        contents: compare checksums as well as sizes.
        part: this caller's index, and the number of callers that share the files.
        progress: called with the number of bytes hashed.
    """
    index, count = part
    chosen = sorted(manifest.files, key=lambda name: manifest.files[name].size)[index::count]
    found = []
    for name in chosen:
        entry = manifest.files[name]
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
        return "" if same else f"{path} is damaged: its checksum differs from {MANIFEST}."

    with ThreadPoolExecutor(2) as pool:
        return [line for line in pool.map(compare, chosen) if line]


def examine(
    directory: Path,
    *,
    contents: bool = True,
    part: tuple[int, int] = (0, 1),
    progress: Callable[[Manifest], Progress] | None = None,
) -> tuple[Manifest | None, list[str]]:
    """Return the manifest of a checkpoint, or None for one of Accelerate's, and its problems.

    Args:
        contents, part: see `problems`.
        progress: returns the function that `problems` calls with its progress.
    """
    if not (directory / MANIFEST).exists():
        wrong = why_not_accelerate(directory)
        return None, [wrong] if wrong else []
    try:
        manifest = read_manifest(directory)
    except CheckpointError as error:
        return None, [str(error)]
    advance = None if progress is None else progress(manifest)
    where = directory / manifest.folder
    return manifest, problems(where, manifest, contents=contents, part=part, progress=advance)


# --- directories of Hugging Face Accelerate --------------------------------------------------------


def why_not_accelerate(directory: Path) -> str:
    """Return why a directory without a manifest is not a checkpoint of Accelerate, or ""."""
    ours = (
        f"{directory / MANIFEST} is missing, so the checkpoint is incomplete or was modified. It "
        "is not loaded."
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
            f"{directory} is not a checkpoint: it contains neither {MANIFEST} (written by "
            f"accelerate-core) nor {states.name} (written by Hugging Face Accelerate)."
        )
    try:
        found = files.read(states, allowed=numpy_globals())
    except CheckpointError as error:
        return str(error)
    if not isinstance(found, dict) or MARK in found or "random_state" not in found:
        return ours
    return ""


def numpy_globals() -> AbstractContextManager[Any]:
    """Allow NumPy arrays while a file is read, because Accelerate stores generators as arrays."""
    try:
        import numpy
    except ImportError:
        return torch.serialization.safe_globals([])
    core: Any = getattr(numpy, "_core", None) or numpy.core
    rebuild = core.multiarray._reconstruct
    allowed: list[Any] = [numpy.ndarray, numpy.dtype, numpy.dtypes.UInt32DType]
    allowed += [(rebuild, f"numpy.{place}.multiarray._reconstruct") for place in ("core", "_core")]
    return torch.serialization.safe_globals(allowed)
