"""Where tables are printed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


#: Columns where there is no terminal: more than any line has, as a log should not break them.
_WIDTH = 10_000


def console(*, stderr: bool = False) -> Console:
    """Return a console for the current stdout or stderr."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else _WIDTH)
