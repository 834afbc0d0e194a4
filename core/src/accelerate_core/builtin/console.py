"""Create consoles for printing tables."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


#: The width if the output is not a terminal: large enough that lines in a log are not wrapped.
_WIDTH = 10_000


def console(*, stderr: bool = False) -> Console:
    """Return a console for the current stdout or stderr."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else _WIDTH)
