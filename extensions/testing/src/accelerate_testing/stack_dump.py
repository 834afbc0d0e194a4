"""Stack dumps that each rank of a hanging check writes when it gets a signal."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

from accelerate_launch.thread_stacks import Frame, short_path, threads_of

#: Makes a rank write its stacks. The core only uses this signal under our agent, which runs no checks.
DUMP_SIGNAL = signal.SIGVTALRM
#: The frame under which a check runs, in `accelerate_testing.worker`.
_CHECK = "run_check"
_STDLIB = str(Path(os.__file__).parent)
#: Frames in these files don't show whose fault it is.
_OTHERS = re.compile(
    r"[/\\](torch|pluggy|accelerate_core|accelerate_checkpoint|accelerate_testing[/\\]training\.py)"
)


def stack_dump_file(folder: Path, rank: int) -> Path:
    """Return the file to which a rank writes its stacks."""
    return folder / f"stacks.{rank}"


def frames_of(dump: str) -> list[Frame]:
    """Return the frames of the thread that runs a check, innermost first; empty if none does."""
    for frames in threads_of(dump):
        names = [name for _, _, name in frames]
        if _CHECK in names:
            return frames[: names.index(_CHECK)]
    return []


def call_site(frames: Sequence[Frame]) -> str:
    """Return the innermost frame, and the frames of the plugin and the check that led to it."""
    own = [f for f in frames[1:] if not _OTHERS.search(f[0]) and not _is_stdlib(f[0])]
    shown = [*frames[:1], *own[:4]]
    return ", called by ".join(f"{name} ({short_path(file)}:{line})" for file, line, name in shown)


def _is_stdlib(file: str) -> bool:
    return file.startswith(_STDLIB) and "site-packages" not in file
