"""Checkpoints with numbers: which is saved next, which is the newest, which go."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate_checkpoint.directories import discard, real_path
from accelerate_checkpoint.manifest import MANIFEST, examine
from accelerate_core.errors import CheckpointError, warn

if TYPE_CHECKING:
    from accelerate_checkpoint.training_state import TrainingState

_NUMBERED = re.compile(r"checkpoint_(\d+)")


def numbered_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """Return number and path of every `checkpoint_<number>` of a directory, the oldest first."""
    paths = root.iterdir() if root.is_dir() else ()
    found = ((_NUMBERED.fullmatch(path.name), path) for path in paths)
    return sorted((int(match[1]), path) for match, path in found if match and path.is_dir())


class Numbering:
    """The numbered checkpoints of a run, in `<project_dir>/checkpoints`."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._resumed = False
        self._damaged: set[str] = set()

    @property
    def automatic(self) -> bool:
        return bool(self._state.project.automatic_checkpoint_naming)

    @property
    def how_to_ask(self) -> str:
        """What a script says to get numbered checkpoints."""
        folder = self._state.project.project_dir or "runs"
        return (
            "Accelerator(project_config=ProjectConfiguration("
            f"{str(folder)!r}, automatic_checkpoint_naming=True))"
        )

    @property
    def root(self) -> Path:
        """The directory of the numbered checkpoints."""
        project = self._state.project.project_dir
        if project is None:
            raise CheckpointError(
                f"Automatic checkpoint naming needs a project_dir: {self.how_to_ask}."
            )
        return real_path(project) / "checkpoints"

    def next(self) -> tuple[Path, str | None]:
        """Return where to save and, as a text, why not; rank 0 chooses the number."""
        state, root = self._state, self.root
        number, trouble = state.project.iteration, None
        if state.process.process_index == 0:
            # One that is later would be the newest for ever, and outlive what this run saves.
            later = [
                other
                for other, path in numbered_checkpoints(root)
                if other >= number and self._is_whole(path)
            ]
            if later and not self._resumed:
                trouble = (
                    f"{root / f'checkpoint_{later[-1]}'} is there already, of an earlier run. "
                    "Call load_state() to go on from it, or set "
                    f"ProjectConfiguration(iteration={later[-1] + 1}) to number on behind it."
                )
            elif later:
                number = later[-1] + 1
        number, trouble = state.collectives.broadcast_object((number, trouble))
        if number != state.project.iteration:
            state.note_once(
                f"checkpoint_{number - 1} is later than the one that was loaded and is kept: "
                f"saving goes on with checkpoint_{number}."
            )
            state.project.iteration = number
        return root / f"checkpoint_{number}", trouble

    def newest_first(self) -> list[Path]:
        """Return the checkpoints that rank 0 sees."""
        found = [path.name for _, path in reversed(numbered_checkpoints(self.root))]
        return [self.root / name for name in self._state.collectives.broadcast_object(found)]

    def pass_over(self, directory: Path) -> None:
        self._damaged.add(str(directory))

    def loaded(self, directory: Path) -> None:
        """Go on behind the checkpoint that was loaded."""
        match = _NUMBERED.fullmatch(directory.name)
        if self.automatic and match:
            self._state.project.iteration = int(match[1]) + 1
            self._resumed = True

    def saved(self, newest: Path, limit: int | None, identity: str) -> None:
        """Keep `limit` checkpoints, now that the new one stands; damaged ones go first."""
        self._damaged.discard(str(newest))
        if limit is None or not self._state.saves_here:
            return
        found = [path for _, path in numbered_checkpoints(newest.parent) if path != newest]
        whole = {path: self._is_whole(path) for path in found}
        # What only has the name of a checkpoint is neither counted nor removed.
        earlier = [path for path in found if whole[path] or (path / MANIFEST).exists()]
        earlier.sort(key=whole.__getitem__)
        for path in earlier[: max(len(earlier) - (limit - 1), 0)]:
            try:
                discard(path, identity)
            except OSError as error:
                warn(f"The old checkpoint {path} cannot be removed: {error}")

    def _is_whole(self, directory: Path) -> bool:
        return str(directory) not in self._damaged and not examine(directory, contents=False)[1]
