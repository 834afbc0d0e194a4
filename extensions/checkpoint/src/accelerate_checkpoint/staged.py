"""Inspect, fetch and clean up checkpoints in a store that files are uploaded to.

The ranks of a machine share one temporary directory for files that are being transferred.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import xxhash

from accelerate_checkpoint import files
from accelerate_checkpoint.files import FileEntry, Progress, checksum
from accelerate_checkpoint.manifest import MANIFEST, Manifest, parse_manifest
from accelerate_checkpoint.on_demand import fetched_on_demand, forget
from accelerate_checkpoint.progress import byte_bar
from accelerate_checkpoint.store import Store, basename, is_save, join
from accelerate_checkpoint.transfer import PART, download, persist
from accelerate_core.plugin import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accelerate_checkpoint.training_state import TrainingState

#: A file of torch.distributed.checkpoint, named after the rank that wrote it.
_SHARD = re.compile(r"(?:.*/)?__(\d+)_\d+\.distcp")


def stored_manifest(storage: Store, place: str) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing or damaged, or cannot be read.
    """
    address = join(place, MANIFEST)
    try:
        text = persist(storage, f"{address} cannot be read", partial(storage.read, place, MANIFEST))
    except FileNotFoundError:
        raise CheckpointError(
            f"There is no checkpoint at {place}: {MANIFEST} is missing."
        ) from None
    return parse_manifest(text, address)


def list_stored(storage: Store, place: str, folder: str = "") -> dict[str, int | None]:
    """Call `Storage.list`, with several attempts.

    Raises:
        CheckpointError: the store cannot be reached.
    """
    what = f"{join(place, folder)} cannot be listed"
    return persist(storage, what, partial(storage.list, place, folder))


def sizes_differ(storage: Store, place: str, manifest: Manifest) -> list[str]:
    """Return which files of a checkpoint are missing or have another size, one line each."""
    sizes: dict[str, int | None] = {}
    folders = {str(PurePosixPath(manifest.folder, name).parent) for name in manifest.files}
    for folder in folders:
        folder = "" if folder == "." else folder
        names = list_stored(storage, place, folder)
        sizes |= {f"{folder}/{name}" if folder else name: size for name, size in names.items()}
    found = []
    for name, entry in manifest.files.items():
        stored = str(PurePosixPath(manifest.folder, name))
        size = sizes.get(stored)
        if size is None:
            found.append(f"{join(place, stored)} is missing.")
        elif size != entry.size:
            found.append(_other_size(join(place, stored), size, entry))
    return found


def _other_size(address: str, size: int, entry: FileEntry) -> str:
    return f"{address} has {size} bytes, but {entry.size} were written."


def contents_differ(
    storage: Store, place: str, manifest: Manifest, progress: Progress
) -> list[str]:
    """Return which files of a checkpoint are damaged or cannot be read, one line each.

    The files are downloaded in parts, and only the parts that are being compared are in memory.

    Args:
        progress: called with the number of bytes compared.
    """

    def compare(name: str) -> str:
        entry, stored = manifest.files[name], str(PurePosixPath(manifest.folder, name))
        address = join(place, stored)
        hashed = xxhash.xxh3_128()
        for start in range(0, entry.size, PART):
            stop = min(start + PART, entry.size)
            fetch = partial(storage.fetch, place, stored, start, stop)
            try:
                data = persist(storage, f"{address} cannot be read", fetch)
            except FileNotFoundError:
                return f"{address} is missing."
            except CheckpointError as error:
                return str(error)
            hashed.update(data)
            progress(len(data))
        return "" if hashed.hexdigest() == entry.checksum else _damaged(address)

    with ThreadPoolExecutor(storage.parallel) as pool:
        return [line for line in pool.map(compare, manifest.files) if line]


def _damaged(address: str) -> str:
    return f"{address} is damaged: its checksum differs from {MANIFEST}."


def why_not_whole(storage: Store, place: str) -> str:
    """Return the first problem with the names and sizes of a checkpoint's files, or ""."""
    try:
        wrong = sizes_differ(storage, place, stored_manifest(storage, place))
    except CheckpointError as error:
        return str(error)
    return wrong[0] if wrong else ""


def delete_leftovers(storage: Store, place: str) -> None:
    """Delete the files of saves that are neither published nor in progress."""
    saves = [name for name in storage.list(place) if is_save(name)]
    if not saves:
        return
    try:
        current = stored_manifest(storage, place).folder
    except CheckpointError:
        if MANIFEST in storage.list(place):
            return  # a damaged manifest does not tell which files belong to it
        current = ""
    for save in saves:
        if save == current:
            continue
        with storage.lock(place, save) as locked:
            if locked:
                storage.delete(place, save)


def delete_checkpoint(storage: Store, place: str) -> None:
    """Delete a checkpoint, manifest first, so an interrupted deletion leaves no checkpoint."""
    if storage.path(place) is None:
        storage.delete(place, MANIFEST)
    storage.delete(place)


class SharedFolder:
    """A temporary directory that the ranks of one machine share.

    Attributes:
        path: the directory, None before `find`.
    """

    def __init__(self, state: TrainingState) -> None:
        process = state.process
        self.machine = process.process_index - process.local_process_index
        self._makes = process.local_process_index == 0
        self._made: str | None = None
        self.path: Path | None = None

    def make(self, kind: str) -> tuple[int, str | None]:
        """Create the directory on the first rank of each machine.

        Args:
            kind: "save" or "load", used in the name of the directory.

        Returns:
            A value to gather from all ranks and pass to `find`.
        """
        if self._makes:
            self._made = tempfile.mkdtemp(prefix=f"accelerate-{kind}-")
        return self.machine, self._made

    def find(self, answers: Sequence[tuple[int, str | None]]) -> None:
        """Set `path` from the values that `make` returned on all ranks."""
        made = [path for machine, path in answers if machine == self.machine and path]
        self.path = Path(made[0])

    def remove(self) -> None:
        """Delete the directory, on the rank that created it."""
        if self.path is not None:
            forget(self.path)
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)
            self._made = None


def fetch_together(
    state: TrainingState, storage: Store, place: str, verify: bool
) -> tuple[Manifest | None, SharedFolder | None, str]:
    """Fetch the files that the ranks of this machine need into a directory that they share.

    Args:
        verify: compare checksums as well as sizes.

    Returns:
        The manifest, the directory, and the first problem that any rank found, or "".
    """
    manifest, wrong = None, ""
    first = state.process.local_process_index == 0
    try:
        manifest = stored_manifest(storage, place)
        if first:
            wrong = "".join(sizes_differ(storage, place, manifest)[:1])
    except (CheckpointError, OSError) as error:
        wrong = str(error)
    wrong = _any(state, wrong)
    if wrong or manifest is None:
        return None, None, wrong
    folder = SharedFolder(state)
    folder.find(state.collectives.gather_object(folder.make("load")))
    assert folder.path is not None
    try:
        if not folder.path.is_dir():
            raise CheckpointError(
                f"Rank {state.process.process_index} cannot find {folder.path}: the ranks of one "
                "machine need a shared temporary directory. Set TMPDIR to one."
            )
        with byte_bar(f"Downloading {basename(place)}", _wanted_size(state, manifest)) as advance:
            _fetch_share(state, storage, place, manifest, folder.path, verify, advance)
    except (CheckpointError, OSError) as error:
        wrong = str(error)
    wrong = _any(state, wrong)
    if wrong:
        folder.remove()
        return None, None, wrong
    return manifest, folder, ""


def _any(state: TrainingState, wrong: str) -> str:
    return next((text for text in state.collectives.gather_object(wrong) if text), "")


def _wanted(state: TrainingState, manifest: Manifest) -> list[str]:
    """Return the files that the ranks of this machine read, largest first.

    Unless the layout has changed, this excludes what ranks of other machines wrote for themselves: their
    random states and gradients, and their shards if the backend fetches missing ones on demand.
    """
    process, facts = state.process, manifest.facts
    saved_by = int(facts.get("world_size", 1))
    skipped: set[str] = set()
    if state.has_layout(saved_by, facts.get("mesh")):
        start = process.process_index - process.local_process_index
        needed = {0, *range(start, start + process.local_num_processes)}
        for rank in {*range(saved_by)} - needed:
            skipped |= {f"{files.RNG}_{rank}.pkl", f"{files.GRADIENTS}_{rank}.bin"}
        if state.shards_on_demand:
            shards = {name: match for name in manifest.files if (match := _SHARD.fullmatch(name))}
            skipped |= {name for name, match in shards.items() if int(match[1]) not in needed}
    names = [name for name in manifest.files if name not in skipped]
    return sorted(names, key=lambda name: (-manifest.files[name].size, name))


def _wanted_size(state: TrainingState, manifest: Manifest) -> int:
    """Return how many bytes one rank fetches, for its bar. The shares are nearly equal."""
    size = sum(manifest.files[name].size for name in _wanted(state, manifest))
    return size // state.process.local_num_processes


def _fetch_share(
    state: TrainingState,
    storage: Store,
    place: str,
    manifest: Manifest,
    folder: Path,
    verify: bool,
    progress: Progress,
) -> None:
    """Fetch this rank's share of the files, and compare them with the manifest."""
    process = state.process
    share = _wanted(state, manifest)[process.local_process_index :: process.local_num_processes]
    root = folder / basename(place)

    def fetch_missing(name: str) -> None:
        target = root / f"{name}.{secrets.token_hex(4)}"  # another rank may fetch it too
        fetch_files(storage, place, manifest, {name: target}, lambda count: None, verify=verify)
        os.replace(target, root / name)

    fetched_on_demand(root, fetch_missing)
    targets = {name: root / name for name in share}
    fetch_files(storage, place, manifest, targets, progress, verify=verify)


def fetch_files(
    storage: Store,
    place: str,
    manifest: Manifest,
    targets: dict[str, Path],
    progress: Progress,
    *,
    verify: bool = True,
) -> None:
    """Fetch files, and compare them with the manifest.

    Args:
        targets: name of the file in the manifest -> where to put it.
        progress: called with the number of bytes received.
        verify: compare checksums as well as sizes.

    Raises:
        CheckpointError: a file is missing or damaged, or cannot be read.
    """
    stored = {name: str(PurePosixPath(manifest.folder, name)) for name in targets}
    wanted = {stored[name]: (path, manifest.files[name].size) for name, path in targets.items()}
    download(storage, place, wanted, progress)
    for name, target in targets.items():
        entry, address = manifest.files[name], join(place, stored[name])
        size = target.stat().st_size
        if size != entry.size:
            raise CheckpointError(_other_size(address, size, entry))
        if verify and checksum(target) != entry:
            raise CheckpointError(_damaged(address))
