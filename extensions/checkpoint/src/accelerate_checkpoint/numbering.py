"""Numbered checkpoints: choose the next number, find the newest, and delete old ones."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from accelerate_checkpoint.manifest import MANIFEST, examine
from accelerate_checkpoint.staged import delete_checkpoint, list_stored, why_not_whole
from accelerate_checkpoint.storage import Storage, basename, join
from accelerate_core.plugin import CheckpointError, warn

if TYPE_CHECKING:
    from accelerate_checkpoint.training_state import TrainingState

_NUMBERED = re.compile(r"checkpoint_(\d+)")


class Numbering:
    """The numbered checkpoints of a run, in `<project_dir>/checkpoints`.

    Args:
        root: replaces `project_dir`.
    """

    def __init__(self, state: TrainingState, storage: Storage, root: str | None = None) -> None:
        self._state = state
        self._storage = storage
        self._given = root
        self._resumed = False
        self._damaged: set[str] = set()

    @property
    def automatic(self) -> bool:
        return bool(self._state.project.automatic_checkpoint_naming)

    @property
    def how_to_ask(self) -> str:
        """The code that turns on automatic checkpoint naming, for error messages."""
        folder = self._state.project.project_dir or "runs"
        return (
            "Accelerator(project_config=ProjectConfiguration("
            f"{str(folder)!r}, automatic_checkpoint_naming=True))"
        )

    @property
    def root(self) -> str:
        """The place of the numbered checkpoints."""
        base = self._given or self._state.project.project_dir
        if base is None:
            raise CheckpointError(
                f"Automatic checkpoint naming needs a project_dir: {self.how_to_ask}."
            )
        return self._storage.locate(join(str(base), "checkpoints"))

    def place_of(self, number: int) -> str:
        """Return the place of the checkpoint with a number. If it is a link, it is not resolved."""
        return join(self.root, f"checkpoint_{number}")

    def _numbers(self) -> list[int]:
        """Return the numbers of all stored checkpoints, damaged or not, oldest first."""
        names = list_stored(self._storage, self.root)
        found = (_NUMBERED.fullmatch(name) for name, size in names.items() if size is None)
        return sorted(int(match[1]) for match in found if match)

    def next(self) -> tuple[str, str | None]:
        """Return where to save, and an error message or None. Rank 0 chooses the number."""
        state = self._state
        number, later, trouble = state.project.iteration, None, None
        if state.process.process_index == 0:
            try:
                number, later, trouble = self._choose(number)
            except Exception as error:  # the other ranks wait for the broadcast
                trouble = str(error)
        number, later, trouble = state.collectives.broadcast_object((number, later, trouble))
        if later is not None and trouble is None:
            state.warn_once(
                f"checkpoint_{later} is later than the checkpoint that was loaded. It is kept, "
                f"and saving continues with checkpoint_{number}."
            )
        state.project.iteration = number
        return self.place_of(number), trouble

    def _choose(self, number: int) -> tuple[int, int | None, str | None]:
        """Return the number to use, the newest checkpoint that is later, and an error or None."""
        # A later checkpoint would remain the newest, and retention would keep it over new ones.
        later = [
            other
            for other in self._numbers()
            if other >= number and self._is_whole(self.place_of(other))
        ]
        newest = later[-1] if later else None
        if newest is not None and not self._resumed:
            return (
                number,
                newest,
                f"{self.place_of(newest)} already exists from an earlier run. Call load_state() "
                "to resume from it, or set "
                f"ProjectConfiguration(iteration={newest + 1}) to start numbering after it.",
            )
        if newest is not None:
            number = newest + 1
        while self._is_broken_link(number):
            number += 1
        return number, newest, None

    def _is_broken_link(self, number: int) -> bool:
        path = self._storage.path(self.place_of(number))
        return path is not None and path.is_symlink() and not path.exists()

    def newest_first(self) -> list[str]:
        """Return the checkpoints that rank 0 sees, newest first.

        Raises:
            CheckpointError: rank 0 cannot list them. Raised on every rank.
        """
        numbers, trouble = [], None
        if self._state.process.process_index == 0:
            try:
                numbers = self._numbers()
            except Exception as error:  # the other ranks wait for the broadcast
                trouble = str(error)
        numbers, trouble = self._state.collectives.broadcast_object((numbers, trouble))
        if trouble is not None:
            raise CheckpointError(trouble)
        return [self.place_of(number) for number in reversed(numbers)]

    def pass_over(self, place: str) -> None:
        self._damaged.add(place)

    def loaded(self, place: str) -> None:
        """Continue the numbering after the checkpoint that was loaded."""
        match = _NUMBERED.fullmatch(basename(place))
        if self.automatic and match:
            self._state.project.iteration = int(match[1]) + 1
            self._resumed = True

    def saved(self, newest: str, limit: int | None) -> None:
        """Delete old checkpoints down to `limit`, damaged ones first."""
        self._damaged.discard(newest)
        if limit is None or not self._state.saves_here:
            return
        try:
            self._keep(newest, limit)
        except Exception as error:  # the new one is complete
            warn(f"Old checkpoints in {self.root} cannot be removed: {error}")

    def _keep(self, newest: str, limit: int) -> None:
        found = [place for number in self._numbers() if (place := self.place_of(number)) != newest]
        whole = {place: self._is_whole(place) for place in found}
        # A directory that only has the name of a checkpoint is neither counted nor removed.
        earlier = [
            place
            for place in found
            if whole[place] or MANIFEST in list_stored(self._storage, place)
        ]
        earlier.sort(key=whole.__getitem__)
        for place in earlier[: max(len(earlier) - (limit - 1), 0)]:
            try:
                delete_checkpoint(self._storage, place)
            except Exception as error:
                warn(f"The old checkpoint {place} cannot be removed: {error}")

    def _is_whole(self, place: str) -> bool:
        if place in self._damaged:
            return False
        directory = self._storage.path(place)
        if directory is None:
            return not why_not_whole(self._storage, place)
        return not examine(directory, contents=False)[1]
