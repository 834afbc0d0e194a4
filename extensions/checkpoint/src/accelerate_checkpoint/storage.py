"""`Storage`: where checkpoints are kept. Another kind of store implements this class and nothing else.

A checkpoint is a set of files at one *place*, which is a path or a URL. Each save has a name of its
own (`save-` and 12 hexadecimal digits) and writes its files below that name, where no reader looks.
`publish` then makes them the checkpoint in a single step, by putting `manifest.json` at the place.

`DirectoryCheckpointer` does the rest: names, checksums, retention, retries, what is uploaded by which
rank, and what is loaded.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from accelerate_checkpoint.lease import hold_lease
from accelerate_checkpoint.staged import delete_leftovers
from accelerate_checkpoint.store import Store, basename, is_save, join

__all__ = ["Storage", "basename", "is_save", "join"]


class Storage(Store):
    """Keeps the files of checkpoints. Subclass it and write the six abstract methods of `Store`."""

    def lock(self, place: str, save: str) -> AbstractContextManager[bool]:
        """Mark a save as under way for as long as the block runs and this process lives.

        The context manager returns False, and marks nothing, if another save has the mark and its
        process may be alive. That distinguishes the leftovers of a killed process from a save that
        another process is still writing.

        The default keeps a small file among those of the save and renews it every minute. After
        the holder was killed it counts as released at once on the same machine, and elsewhere
        after ten minutes.

        Args:
            place: of the checkpoint.
            save: name of the save.
        """
        return hold_lease(self, place, save)

    def clean(self, place: str) -> None:
        """Delete what saves of killed processes left at a place."""
        delete_leftovers(self, place)
