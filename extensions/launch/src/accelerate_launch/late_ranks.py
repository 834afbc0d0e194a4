"""Where the other ranks were when one gave up waiting for them."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate_launch.thread_stacks import Frame, short_path, threads_of
from accelerate_launch.uncaught import DUMP_SIGNAL, DUMP_SUFFIX

#: Seconds in which a rank writes its stacks.
_DUMP = 2.0
#: What a rank says that waited for another one.
_TIMEOUT = re.compile(r"time[d ]? ?out|waited [\d.]+ s", re.IGNORECASE)
_found: list[str] = []


def ask(processes: Any, first_rank: int) -> None:
    """Ask the ranks that still run where they are, if another one has timed out.

    Args:
        processes: torch's processes of this machine.
        first_rank: the rank of the first of them.
    """
    handlers = getattr(processes, "subprocess_handlers", None)
    if not handlers or DUMP_SIGNAL is None or _found:
        return
    ended = {local: handler.proc.poll() for local, handler in handlers.items()}
    files = {local: Path(str(processes.error_files[local])) for local in handlers}
    failed = [local for local, status in ended.items() if status]
    if not any(_timed_out(files[local], ended[local]) for local in failed):
        return
    for local in sorted(local for local, status in ended.items() if status is None):
        stacks = Path(f"{files[local]}{DUMP_SUFFIX}")
        text = "had not constructed an Accelerator yet: it was still importing or loading something"
        if stacks.exists():
            text = describe_stacks(_dump(handlers[local].proc.pid, stacks))
        if text:
            _found.append(f"Meanwhile rank {first_rank + local} {text}.")


def take_lines() -> list[str]:
    """Return what `ask` found out, once."""
    lines = list(_found)
    _found.clear()
    return lines


def _timed_out(file: Path, status: int | None) -> bool:
    """Return whether a rank failed because it waited too long, or was aborted, perhaps for that reason."""
    if status == -signal.SIGABRT:
        return True
    try:
        recorded = json.loads(file.read_text(encoding="utf-8", errors="replace"))
        # The traceback would match if the script sets a timeout.
        return bool(_TIMEOUT.search(recorded["message"]["message"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _dump(pid: int, file: Path) -> str:
    assert DUMP_SIGNAL is not None
    start = file.stat().st_size  # accelerate-watch may have requested stacks before
    with suppress(ProcessLookupError):
        os.kill(pid, DUMP_SIGNAL)
    until = time.monotonic() + _DUMP
    before = -1
    size = start
    while time.monotonic() < until and not (size > start and size == before):
        time.sleep(0.05)
        before = size
        size = file.stat().st_size
    return file.read_bytes()[start:].decode("utf-8", errors="replace")


def describe_stacks(dump: str) -> str:
    """Return what the main thread of a rank was doing, "" if the stacks don't tell.

    Args:
        dump: what `faulthandler` wrote.
    """
    frames = next((one for one in threads_of(dump) if one and one[-1][2] == "<module>"), [])
    if not frames:
        return ""
    file, line, function = frames[0]
    text = f"was in {function} ({short_path(file)} line {line})"
    if hook := _hook(frames):
        text = f"was in the hook {hook}"
    if imported := _import(frames):
        return f"{text}, importing {imported}" if hook else f"was importing {imported}"
    script, line, _ = frames[-1]
    return f"{text}, called from {short_path(script)} line {line}"


def _hook(frames: Sequence[Frame]) -> str:
    """Return the innermost hook of a plugin and where it is, "" outside of hooks."""
    import accelerate_core.backend  # noqa: F401  # declares the owner hooks
    from accelerate_core.contract.hooks import HOOKS

    for file, line, function in frames:
        if function in HOOKS and "accelerate_core" not in Path(file).parts:
            return f"{function!r} ({short_path(file)} line {line})"
    return ""


def _import(frames: Sequence[Frame]) -> str:
    """Return the file that is being imported, "" if none is."""
    for at, (file, _, _) in enumerate(frames):
        if file.startswith("<frozen importlib"):
            inside = [one for one in frames[:at] if one[2] == "<module>"]
            return short_path(inside[-1][0]) if inside else "a module"
    return ""
