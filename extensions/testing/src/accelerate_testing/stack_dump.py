"""Stack dumps of the ranks of a check that hangs, which each rank writes when it gets a signal."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

#: Makes a rank write its stacks; a signal that nothing else uses.
DUMP_SIGNAL = signal.SIGVTALRM
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
#: The frame under which a check runs, in `accelerate_testing.worker`.
_CHECK = "run_check"
_STDLIB = str(Path(os.__file__).parent)
#: Frames of these tell nothing about whose fault it is.
_OTHERS = re.compile(
    r"[/\\](torch|pluggy|accelerate_core|accelerate_checkpoint|accelerate_testing[/\\]training\.py)"
)
#: File, line and function.
Frame = tuple[str, str, str]


def stack_dump_file(folder: Path, rank: int) -> Path:
    """Return the file into which a rank writes its stacks when it is asked."""
    return folder / f"stacks.{rank}"


def frames_of(dump: str) -> list[Frame]:
    """Return the frames of the thread that runs a check, the innermost first; none where none does."""
    for thread in re.split(r"^(?:Current t|T)hread ", dump, flags=re.MULTILINE):
        frames: list[Frame] = _FRAME.findall(thread)
        names = [name for _, _, name in frames]
        if _CHECK in names:
            return frames[: names.index(_CHECK)]
    return []


def call_site(frames: Sequence[Frame]) -> str:
    """Return the innermost frame, and those that called it in the plugin and in the check."""
    own = [f for f in frames[1:] if not _OTHERS.search(f[0]) and not _is_stdlib(f[0])]
    shown = [*frames[:1], *own[:4]]
    return ", called by ".join(f"{name} ({_short(file)}:{line})" for file, line, name in shown)


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-2:])


def _is_stdlib(file: str) -> bool:
    return file.startswith(_STDLIB) and "site-packages" not in file
