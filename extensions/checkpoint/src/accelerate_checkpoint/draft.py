"""One save until it is published: written in place, or to a temporary directory and uploaded.

Methods that take `gather` are collective: all ranks call them, in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch

from accelerate_checkpoint.collect import collect
from accelerate_checkpoint.files import FileEntry, checksum
from accelerate_checkpoint.manifest import MANIFEST, Manifest, inner_name, parse_manifest, problems
from accelerate_checkpoint.progress import byte_bar
from accelerate_checkpoint.staged import SharedFolder, sizes_differ
from accelerate_checkpoint.storage import Storage, basename, join
from accelerate_checkpoint.transfer import persist, upload
from accelerate_core.plugin import CheckpointError, CommunicatorView, warn

if TYPE_CHECKING:
    from accelerate_checkpoint.training_state import TrainingState

Gather = Callable[[Any], list[Any]]
Entries = Mapping[str, FileEntry]
T = TypeVar("T")


class Report(NamedTuple):
    """What one rank reports after writing its files.

    Attributes:
        files: the files whose checksums are known.
        machine: the first rank of its machine.
    """

    files: Entries
    machine: int

    def as_json(self) -> list[Any]:
        """Return the report as plain JSON."""
        files = [[name, entry.size, entry.checksum] for name, entry in self.files.items()]
        return [files, self.machine]

    @classmethod
    def from_json(cls, content: Any) -> Report:
        """Return the report that `as_json` described.

        Raises:
            CheckpointError: the content has another form.
        """
        try:
            files, machine = content
            entries = {
                inner_name(name): FileEntry(int(size), str(digest)) for name, size, digest in files
            }
            return cls(entries, int(machine))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"A rank sent an invalid list of files: {error}") from error


class Draft(Protocol):
    """A save that readers cannot see yet.

    Attributes:
        place: where it will be published.
        publishes: whether this rank publishes it.
        published: whether it is known to be published although `publish` failed.
        needs_answers: whether `join` needs the results of `begin`.
    """

    place: str
    publishes: bool
    published: bool
    needs_answers: bool

    #: What the user can do if a rank does not see `directory`.
    advice: str

    @property
    def directory(self) -> Path:
        """Where this rank writes its files."""

    def begin(self) -> object:
        """Prepare the save. If `needs_answers`, every rank passes the results of all to `join`."""

    def join(self, answers: Sequence[Any]) -> None:
        """Receive the results of `begin` on all ranks."""

    def collect(self, own: Report, collectives: CommunicatorView) -> list[Report]:
        """Return the reports that this rank needs: of all ranks, of its machine, or none."""

    def deliver(self, reports: Sequence[Report], gather: Gather, shown: bool) -> Sequence[Entries]:
        """Move the written files to the store. Return the files of each rank.

        Args:
            shown: show a progress bar on a terminal.

        Raises:
            CheckpointError: a file could not be written. Raised on every rank.
        """

    def publish(self, written: Sequence[Entries], facts: Mapping[str, Any]) -> None:
        """List all files in a manifest, and publish them as the checkpoint."""

    def abandon(self) -> None:
        """Delete the written files, on the rank that would have published them."""

    def close(self) -> None:
        """Release locks and temporary files, once all ranks are done with them."""


def new_draft(state: TrainingState, storage: Storage, place: str, save: str) -> Draft:
    """Return a draft of the kind that the storage needs.

    Args:
        save: name of the save, the same on all ranks.
    """
    if storage.path(place) is None:
        return UploadedDraft(state, storage, place, save)
    return InPlaceDraft(state, storage, place, save)


class InPlaceDraft:
    """A save that all ranks write into one directory, which is then renamed."""

    needs_answers = False
    advice = (
        "save to a file system that all machines share, or set "
        "ProjectConfiguration(save_on_each_node=True)"
    )

    def __init__(self, state: TrainingState, storage: Storage, place: str, save: str) -> None:
        self._storage = storage
        self.place = place
        self._save = save
        self.publishes = state.saves_here
        self.published = False
        process = state.process
        self._machine = process.process_index - process.local_process_index
        #: The ranks that share this directory.
        self._sharing = range(process.num_processes)
        if state.project.save_on_each_node:
            self._sharing = range(self._machine, self._machine + process.local_num_processes)
        self._held = ExitStack()

    @property
    def directory(self) -> Path:
        """The directory of the save, shared by all ranks."""
        path = self._storage.path(self.place, self._save)
        assert path is not None
        return path

    def begin(self) -> None:
        """Create the directory."""
        if self.publishes:
            self._storage.clean(self.place)
            self._held.enter_context(self._storage.lock(self.place, self._save))

    def join(self, answers: Sequence[Any]) -> None:
        """Not called: every rank derives the directory from its name."""

    def collect(self, own: Report, collectives: CommunicatorView) -> list[Report]:
        """Return the reports of the ranks that share this directory, on the rank that publishes it."""
        if collectives.size == 1:
            return [own]
        reports = collect("files", own.as_json(), self._sharing if self.publishes else ())
        return [Report.from_json(report) for report in reports]

    def deliver(self, reports: Sequence[Report], gather: Gather, shown: bool) -> list[Entries]:
        """Return the files of the reports. Nothing has to be moved."""
        return [one.files for one in reports]

    def publish(self, written: Sequence[Entries], facts: Mapping[str, Any]) -> None:
        """List the files of the directory in a manifest, and rename it."""
        directory = self.directory
        listed = {name: entry for one in written for name, entry in one.items()}
        # Plugins and the user's hooks wrote their files without us, so they have no checksums yet.
        for name in _files_below(directory):
            if name not in listed:
                path = directory / name
                listed[name] = checksum(path)
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        manifest = Manifest(listed, dict(facts))
        wrong = problems(directory, manifest, contents=False)
        if wrong:
            raise CheckpointError(wrong[0])
        text = manifest.render().encode()
        try:
            self._storage.publish(self.place, self._save, text)
        except OSError:
            with suppress(OSError):
                self.published = self._storage.read(self.place, MANIFEST) == text
            raise

    def abandon(self) -> None:
        """Delete the directory."""
        if self.publishes:
            self._storage.delete(self.place, self._save)

    def close(self) -> None:
        """Unlock the directory."""
        self._held.close()


class UploadedDraft:
    """A save that is written to a temporary directory and uploaded, with the manifest last.

    Each rank uploads its own files, and its share of the files that plugins wrote on its machine.
    If several machines wrote a file of the same name, the lowest rank uploads it.
    """

    needs_answers = True
    advice = "the ranks of one machine need a shared temporary directory: set TMPDIR"

    def __init__(self, state: TrainingState, storage: Storage, place: str, save: str) -> None:
        self._storage = storage
        self.place = place
        self._save = save
        self._rank = state.collectives.rank
        self.publishes = self._rank == 0
        self.published = False
        self._folder = SharedFolder(state)
        self._held = ExitStack()
        #: Whether the store was asked to publish.
        self._asked = False

    @property
    def directory(self) -> Path:
        """The directory that the ranks of this machine share."""
        assert self._folder.path is not None
        return self._folder.path

    def begin(self) -> tuple[int, str | None]:
        """Lock the save, and create the directory of this machine."""
        if self.publishes:
            persist(self._storage, f"{self.place} cannot be written", self._prepare)
        return self._folder.make("save")

    def _prepare(self) -> None:
        self._storage.clean(self.place)
        if not self._held.enter_context(self._storage.lock(self.place, self._save)):
            raise CheckpointError(f"Another save to {self.place} is in progress.")

    def join(self, answers: Sequence[Any]) -> None:
        """Find the directory of this machine."""
        self._folder.find(answers)

    def collect(self, own: Report, collectives: CommunicatorView) -> list[Report]:
        """Return the reports of all ranks, which divide the files that are in no report."""
        return collectives.gather_object(own)

    def deliver(self, reports: Sequence[Report], gather: Gather, shown: bool) -> list[Entries]:
        """Upload this rank's files."""
        peers = [rank for rank, one in enumerate(reports) if one.machine == self._folder.machine]
        listed = {name for rank in peers for name in reports[rank].files}
        unlisted = [name for name in _files_below(self.directory) if name not in listed]
        share = unlisted[peers.index(self._rank) :: len(peers)]
        names: list[list[str]] = gather([*reports[self._rank].files, *share])
        taken = {name for rank in range(self._rank) for name in names[rank]}
        mine = [name for name in names[self._rank] if name not in taken]
        trouble, cause = None, None
        entries: dict[str, FileEntry] = {}
        try:
            known = reports[self._rank].files
            for name in mine:
                entries[name] = known.get(name) or checksum(self.directory / name)
            self._upload(entries, shown)
        except Exception as error:
            trouble, cause = str(error), error
        answers: list[tuple[str | None, Entries]] = gather((trouble, entries))
        raise_any([text for text, _ in answers], self.place, cause)
        return [found for _, found in answers]

    def _upload(self, entries: Entries, shown: bool) -> None:
        sources = {f"{self._save}/{name}": self.directory / name for name in entries}
        size = sum(entry.size for entry in entries.values())
        with byte_bar(f"Uploading {basename(self.place)}", size, shown=shown) as advance:
            upload(self._storage, self.place, sources, advance)

    def publish(self, written: Sequence[Entries], facts: Mapping[str, Any]) -> None:
        """Write the manifest, after every file that it lists is in the store."""
        listed = {name: entry for one in written for name, entry in one.items()}
        manifest = Manifest(listed, dict(facts), self._save)
        wrong = sizes_differ(self._storage, self.place, manifest)
        if wrong:
            raise CheckpointError(f"{wrong[0]} All ranks must write to the same store.")
        text = manifest.render().encode()
        address = join(self.place, MANIFEST)
        self._asked = True
        try:
            persist(
                self._storage,
                f"{address} cannot be written",
                lambda: self._storage.publish(self.place, self._save, text),
            )
        except CheckpointError:
            if not self._is_published():
                raise
        try:
            self._storage.clean(self.place)
        except Exception as error:  # the checkpoint is complete; the next save tries again
            warn(f"The previous files of {self.place} cannot be deleted: {error}")

    def _is_published(self) -> bool:
        """Return whether this save's manifest is stored. A request that failed may have stored it."""
        if not self._asked:
            return False
        try:
            text = persist(
                self._storage,
                f"{self.place} cannot be read",
                lambda: self._storage.read(self.place, MANIFEST),
            )
        except FileNotFoundError:
            return False
        return parse_manifest(text, self.place).folder == self._save

    def abandon(self) -> None:
        """Delete the uploaded files. If that fails, the next save deletes them."""
        if not self.publishes:
            return
        try:
            if not self._is_published():
                self._storage.delete(self.place, self._save)
        except Exception as error:
            warn(f"The files in {join(self.place, self._save)} could not be deleted: {error}")

    def close(self) -> None:
        """Delete the temporary directory."""
        self._held.close()
        self._folder.remove()


def _files_below(directory: Path) -> list[str]:
    """Return the paths of all files, relative to the directory and sorted."""
    return [
        path.relative_to(directory).as_posix()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    ]


class PublishFailure(NamedTuple):
    """An error while a checkpoint was published, and whether it was published nevertheless."""

    text: str
    published: bool


def gather_failures(collectives: CommunicatorView, failure: T | None) -> list[T | None]:
    """Return the failures of all ranks, or [] if no rank has failed.

    Without a failure, the ranks only reduce one number.
    """
    failed = torch.tensor([0 if failure is None else 1], device=collectives.device)
    if not collectives.reduce(failed, "max", overwrite=True).item():
        return []
    return collectives.gather_object(failure)


def raise_any(
    troubles: Sequence[str | None],
    place: str,
    cause: BaseException | None = None,
    *,
    published: bool = False,
) -> None:
    """Raise on every rank if any rank failed, with the failures of all ranks in the message.

    Args:
        published: whether the checkpoint was published before the failure.
    """
    found: dict[str, list[int]] = {}
    for rank, trouble in enumerate(troubles):
        if trouble:
            found.setdefault(trouble, []).append(rank)
    if found:
        lines = [
            f"rank {', '.join(map(str, ranks))}: {trouble}" if len(troubles) > 1 else trouble
            for trouble, ranks in found.items()
        ]
        outcome = (
            "is complete, but it may be lost if this machine loses power now."
            if published
            else "was not saved. Earlier checkpoints are unchanged."
        )
        raise CheckpointError(f"The checkpoint {place} {outcome} " + " ".join(lines)) from cause
