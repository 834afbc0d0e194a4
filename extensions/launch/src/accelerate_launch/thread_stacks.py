"""Read the stacks that `faulthandler` writes."""

from __future__ import annotations

import re
from pathlib import Path

#: File, line and function.
Frame = tuple[str, str, str]

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


def threads_of(dump: str) -> list[list[Frame]]:
    """Return the frames of each thread in a dump, with the most recent call first."""
    threads = re.split(r"^(?:Current t|T)hread ", dump, flags=re.MULTILINE)
    return [_FRAME.findall(thread) for thread in threads]


def short_path(file: str) -> str:
    """Return the last two parts of a path."""
    return "/".join(Path(file).parts[-2:])
