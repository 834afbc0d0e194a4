"""Checkpoints that commands inspect: in directories, and in the stores of other checkpointers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from accelerate_checkpoint import files
from accelerate_checkpoint.files import Progress
from accelerate_checkpoint.local_storage import is_url
from accelerate_checkpoint.manifest import MANIFEST, Manifest, examine, read_manifest
from accelerate_checkpoint.merging import merge_weights, refuse_checkpoint
from accelerate_checkpoint.model import is_weights
from accelerate_checkpoint.progress import byte_bar
from accelerate_checkpoint.shards import METADATA
from accelerate_checkpoint.staged import (
    contents_differ,
    delete_checkpoint,
    fetch_files,
    list_stored,
    sizes_differ,
    stored_manifest,
)
from accelerate_checkpoint.storage import Storage, basename, join
from accelerate_checkpoint.transfer import download
from accelerate_core.plugin import (
    CheckpointError,
    PluginFactory,
    ProjectConfiguration,
    Request,
    Sources,
    Topology,
    resolve_core,
    select,
)

#: Returns the function that reports how many bytes of a checkpoint have been compared.
Begin: TypeAlias = Callable[[Manifest], Progress]

#: Files of a checkpoint that never hold weights.
_NO_WEIGHTS = (
    files.OPTIMIZER, files.SCHEDULER, files.GRADIENTS, files.SCALER, files.RNG, files.CUSTOM,
)  # fmt: skip


def place_at(text: str) -> LocalPlace | StoredPlace:
    """Return the place for a directory or a URL.

    Raises:
        CheckpointError: there is no such directory, or no store for this kind of URL.
        MissingPluginError: the plugin for URLs is not installed.
    """
    if is_url(text):
        storage = _storage_of(text)
        return StoredPlace(storage, storage.locate(text))
    path = Path(text)
    if not path.is_dir():
        raise CheckpointError(f"There is no directory {text}.")
    return LocalPlace(path)


def _storage_of(url: str) -> Storage:
    """Return the storage that an Accelerator with this `project_dir` would use."""
    sources = Sources.of(os.environ)
    wanted = resolve_core({}, sources, {})["checkpointer"]
    request = Request({"project_dir": url}, os.environ, Topology(), sources.config)
    record = select("checkpointer", request, wanted).or_raise().record
    made = PluginFactory(sources).create(record, ProjectConfiguration(url), None)
    storage = getattr(made, "storage", None)
    if not isinstance(storage, Storage):
        raise CheckpointError(
            f"The checkpointer {record.label} has no Storage that could list {url}. Commands read the "
            "attribute `storage` of a DirectoryCheckpointer."
        )
    return storage


@dataclass(frozen=True)
class LocalPlace:
    """A checkpoint, or a directory of checkpoints, on the local disk."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.name

    def checkpoints(self) -> list[LocalPlace]:
        """Return this checkpoint, or those in the directory and in its `checkpoints` folder.

        Checkpoints without a manifest count too, because commands exist to find such damage.
        """
        if self._is_checkpoint():
            return [self]
        roots = [root for root in (self.path, self.path / "checkpoints") if root.is_dir()]
        below = [path for root in roots for path in _by_number(root)]
        # Hidden directories belong to saves that are in progress or were killed.
        shown = [LocalPlace(path) for path in below if not path.name.startswith(".")]
        return [one for one in shown if one._is_checkpoint()]

    def _is_checkpoint(self) -> bool:
        if not self.path.is_dir():
            return False
        return (self.path / MANIFEST).exists() or any(self.path.glob(f"{files.RNG}_*.pkl"))

    def manifest(self) -> Manifest:
        """Read the manifest."""
        return read_manifest(self.path)

    def examine(
        self, *, contents: bool, progress: Begin | None = None
    ) -> tuple[Manifest | None, list[str]]:
        """Return the manifest, None for a checkpoint of Accelerate, and the problems with the files.

        Args:
            contents: compare checksums as well as sizes.
        """
        return examine(self.path, contents=contents, progress=progress)

    def merge(self, output: Path, *, safe_serialization: bool, remove: bool) -> Path:
        """Write the weights as one file into `output`. See `merge_weights`."""
        return merge_weights(
            self.path, output, safe_serialization=safe_serialization, remove=remove
        )


def _by_number(root: Path) -> list[Path]:
    return sorted(root.iterdir(), key=lambda path: _order(path.name))


def _order(name: str) -> tuple[bool, int, str]:
    """Return the sort key: by name, with numbered checkpoints last and in numeric order."""
    number = name.removeprefix("checkpoint_")
    return number.isdigit(), int(number) if number.isdigit() else 0, name


@dataclass(frozen=True)
class StoredPlace:
    """A checkpoint, or a folder of checkpoints, in a store that files are uploaded to."""

    storage: Storage
    address: str

    def __str__(self) -> str:
        return self.address

    @property
    def name(self) -> str:
        """The last part of the address."""
        return basename(self.address)

    def checkpoints(self) -> list[StoredPlace]:
        """Return this checkpoint, or those in the folder and in its `checkpoints` folder.

        Without a manifest, there are only the files of a save that is in progress or was killed.
        """
        names = self._names()
        if MANIFEST in names:
            return [self]
        numbered = self._below("checkpoints")
        roots = [(self, names), (numbered, numbered._names() if "checkpoints" in names else {})]
        found = []
        for root, below in roots:
            folders = [name for name, size in below.items() if size is None]
            places = [root._below(name) for name in sorted(folders, key=_order)]
            found += [one for one in places if MANIFEST in one._names()]
        return found

    def _below(self, name: str) -> StoredPlace:
        return StoredPlace(self.storage, join(self.address, name))

    def _names(self) -> dict[str, int | None]:
        return list_stored(self.storage, self.address)

    def manifest(self) -> Manifest:
        """Read the manifest."""
        return stored_manifest(self.storage, self.address)

    def examine(
        self, *, contents: bool, progress: Begin | None = None
    ) -> tuple[Manifest | None, list[str]]:
        """Return the manifest and the problems with the files.

        Args:
            contents: compare checksums as well as sizes, which downloads all files.
        """
        try:
            manifest = self.manifest()
            wrong = sizes_differ(self.storage, self.address, manifest)
        except CheckpointError as error:
            return None, [str(error)]
        if wrong or not contents:
            return manifest, wrong
        advance: Progress = _ignore if progress is None else progress(manifest)
        return manifest, contents_differ(self.storage, self.address, manifest, advance)

    def merge(self, output: Path, *, safe_serialization: bool, remove: bool) -> Path:
        """Download the files with weights next to `output`, and write the weights as one file into it."""
        refuse_checkpoint(output)
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".merge-weights-", dir=output.parent) as folder:
            source = Path(folder, self.name)
            source.mkdir()
            self._fetch_weights(source)
            try:
                made = merge_weights(source, output, safe_serialization=safe_serialization)
            except CheckpointError as error:
                raise CheckpointError(str(error).replace(str(source), self.address)) from error
        if remove:
            delete_checkpoint(self.storage, self.address)
        return made

    def _fetch_weights(self, target: Path) -> None:
        """Download the files that may hold weights. With a manifest, their checksums are compared."""
        names = self._names()
        download_bar = partial(byte_bar, f"Downloading {self.name}")
        if MANIFEST in names:
            manifest = self.manifest()
            targets = {
                name: target / name
                for name in manifest.files
                if not PurePosixPath(name).parts[0].startswith(_NO_WEIGHTS)
            }
            with download_bar(sum(manifest.files[name].size for name in targets)) as advance:
                fetch_files(self.storage, self.address, manifest, targets, advance)
            return
        # save_model and torch.distributed.checkpoint write no manifest.
        sizes = {name: size for name, size in names.items() if size is not None}
        if METADATA not in names:
            sizes = {name: size for name, size in sizes.items() if is_weights(name)}
        if not sizes:
            raise CheckpointError(
                f"There are no weights at {self.address}: it has neither {MANIFEST} nor files of weights."
            )
        with download_bar(sum(sizes.values())) as advance:
            wanted = {name: (target / name, size) for name, size in sizes.items()}
            download(self.storage, self.address, wanted, advance)


def _ignore(count: int) -> None:
    pass
