"""`Storage`: where checkpoints are kept. To support another kind of store, implement only this class.

A checkpoint is a set of files at one *place*, which is a path or a URL. Each save has a unique name
(`save-` and 12 hexadecimal digits) and writes its files below that name, where no reader looks.
`publish` then makes them the checkpoint in a single step, by putting `manifest.json` at the place.

`DirectoryCheckpointer` does the rest: names, checksums, retention, retries, which rank uploads what,
and loading.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from accelerate_checkpoint.lease import hold_lease
from accelerate_checkpoint.staged import delete_leftovers
from accelerate_checkpoint.store import Store, basename, is_save, join

__all__ = ["Storage", "basename", "is_save", "join"]


class Storage(Store):
    """Keeps the files of checkpoints. Subclass it and implement the six abstract methods."""

    def lock(self, place: str, save: str) -> AbstractContextManager[bool]:
        """Mark a save as in progress while the block runs and this process lives.

        The context manager yields False, and marks nothing, if another process has marked the save
        and may still be alive. This distinguishes leftovers of a killed process from a save that
        another process is still writing.

        The default writes a small file next to those of the save and renews it every minute. If
        its process was killed, the mark ends at once on the same machine, and after ten minutes
        on others.

        Args:
            place: address of the checkpoint.
            save: name of the save.
        """
        return hold_lease(self, place, save)

    def clean(self, place: str) -> None:
        """Delete the files that saves of killed processes left at a place."""
        delete_leftovers(self, place)
