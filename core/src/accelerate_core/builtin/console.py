"""Where tables are printed."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def console(*, stderr: bool = False) -> Console:
    """Return a console on the present stdout or stderr."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    # Without a terminal a log should not break lines as a narrow window does, but where COLUMNS asks for it.
    return Console(file=stream, width=None if stream.isatty() or "COLUMNS" in os.environ else 160)
