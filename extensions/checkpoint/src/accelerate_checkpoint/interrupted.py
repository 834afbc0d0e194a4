"""After Ctrl-C, name the checkpoint from which the run can continue."""

from __future__ import annotations

import sys
from types import TracebackType

from accelerate_core.plugin import without_credentials

_newest = ""
_installed = False


def remember(place: str) -> None:
    """Remember a checkpoint that was saved or loaded. An uncaught Ctrl-C gets a note that names it."""
    global _installed, _newest
    _newest = without_credentials(place)
    if _installed:
        return
    _installed = True
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            error.add_note(f"The last checkpoint is {_newest}.")
        previous(kind, error, trace)

    sys.excepthook = hook
