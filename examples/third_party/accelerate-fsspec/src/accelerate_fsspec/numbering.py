"""Checkpoints with numbers, below one URL: which is saved next, which is the newest, which go."""

from __future__ import annotations

import re
from collections.abc import Callable

from accelerate_checkpoint import TrainingState
from accelerate_core.errors import CheckpointError
from accelerate_fsspec.location import Location

__all__ = ["Numbering"]

_NAME = re.compile(r"checkpoint_(\d+)")


class Numbering:
    """The numbered checkpoints of a run, below `<url or project_dir>/checkpoints`.

    Args:
        place: the place of a target.
    """

    def __init__(
        self, state: TrainingState, place: Callable[[str], Location], url: str | None
    ) -> None:
        self._state, self._place, self._url = state, place, url
        self._resumed = False

    @property
    def automatic(self) -> bool:
        """Whether saves are numbered."""
        return bool(self._state.project.automatic_checkpoint_naming)

    def _base(self) -> str:
        base = self._url or self._state.project.project_dir
        if base is None:
            raise CheckpointError(
                "Automatic checkpoint naming needs ACCELERATE_FSSPEC_URL or a project_dir."
            )
        return f"{str(base).rstrip('/')}/checkpoints"

    def _numbered(self, number: int) -> Location:
        return self._place(f"{self._base()}/checkpoint_{number}")

    def _numbers(self) -> list[int]:
        """Return the numbers that are there, whole or not."""
        base = self._place(self._base())
        base.fs.invalidate_cache()
        if not base.fs.exists(base.root):
            return []
        names = [
            str(path).rstrip("/").rpartition("/")[2] for path in base.fs.ls(base.root, detail=False)
        ]
        return sorted(int(found[1]) for name in names if (found := _NAME.fullmatch(name)))

    def _whole(self, number: int) -> bool:
        try:
            self._numbered(number).manifest()
        except CheckpointError:
            return False
        return True

    def next(self) -> Location:
        """Return where to save; rank 0 chooses the number.

        Raises:
            CheckpointError: a later one is there, of an earlier run.
        """
        state = self._state
        number, trouble = int(state.project.iteration), ""
        if state.process.process_index == 0:
            later = [other for other in self._numbers() if other >= number and self._whole(other)]
            if later and not self._resumed:
                trouble = (
                    f"{self._numbered(later[-1]).url} is there already, of an earlier run. Call "
                    "load_state() to go on from it, or set "
                    f"ProjectConfiguration(iteration={later[-1] + 1})."
                )
            elif later:
                number = later[-1] + 1
        number, trouble = state.collectives.broadcast_object((number, trouble))
        if trouble:
            raise CheckpointError(trouble)
        state.project.iteration = number
        return self._numbered(number)

    def newest_first(self) -> list[Location]:
        """Return the checkpoints that rank 0 sees."""
        numbers = self._state.collectives.broadcast_object(self._numbers())
        return [self._numbered(number) for number in reversed(numbers)]

    def loaded(self, place: Location) -> None:
        """Go on behind the checkpoint that was loaded."""
        found = _NAME.fullmatch(place.root.rpartition("/")[2])
        if self.automatic and found is not None:
            self._state.project.iteration = int(found[1]) + 1
            self._resumed = True

    def keep(self, limit: int, newest: Location) -> None:
        """Remove the oldest, now that the new one stands."""
        earlier = [n for n in self._numbers() if self._numbered(n).root != newest.root]
        whole = [number for number in earlier if self._whole(number)]
        for number in whole[: max(len(whole) - (limit - 1), 0)]:
            self._numbered(number).remove()
