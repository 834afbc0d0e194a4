"""What a plugin leaves behind: threads, processes, files and prints."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from unittest import mock

import psutil

from accelerate_testing.checks import SUITE_KINDS, check

if TYPE_CHECKING:
    from accelerate_testing.context import CheckContext

#: Seconds in which what was told to end may do so.
_GRACE = 2.0
#: Folders of caches and settings, of whichever library wrote them, and of no files at all.
_CACHES = {"__pycache__", ".cache", ".config", ".local"}
_DEVICES = ("/dev/", "/proc/", "/sys/")
#: Whose frames say nothing of who writes.
_NOBODY = {*sys.stdlib_module_names, "accelerate_core", "accelerate_tracking", "accelerate_testing"}


def held_now(whose: str = "") -> list[str]:
    """Return the threads and processes this one has started, and the files it has open.

    Args:
        whose: the package whose threads count; default: those of any.
    """
    own = psutil.Process()
    mine = {whose, *sys.stdlib_module_names}
    threads = [
        one for one in threading.enumerate() if not whose or _code(one).split(".")[0] in mine
    ]
    return [
        *(f"thread {one.name} ({one.ident})" for one in threads),
        *(f"process {one.name()} ({one.pid})" for one in own.children(recursive=True)),
        *(f"open file {one.path} (descriptor {one.fd})" for one in own.open_files()),
    ]


def _code(thread: threading.Thread) -> str:
    """Return the module whose code a thread runs."""
    return str((getattr(thread, "_target", None) or type(thread)).__module__)


def still_held(earlier: Sequence[str], whose: str = "") -> list[str]:
    """Return what is held that was not earlier; what was told to end has a little time for it."""
    until = time.monotonic() + _GRACE
    while True:
        left = [one for one in held_now(whose) if one not in earlier]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.05)


#: While a later life lasts: path -> the package that had Python write there.
_written: dict[str, str] | None = None


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    """Keep who opens what for writing; of other programs' files in these places nothing is seen."""
    if _written is None or event not in ("open", "os.mkdir", "os.rename"):
        return
    path = arguments[event == "os.rename"]
    if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
        return
    if isinstance(path, str | bytes | os.PathLike):
        _written[os.path.abspath(os.fsdecode(path))] = _package_of(sys._getframe(1))


def _save(save: Any, what: Any, target: Any, *arguments: Any, **options: Any) -> Any:
    """Save as torch does, whose own code opens the file."""
    _hear("open", (target, None, os.O_WRONLY))
    return save(what, target, *arguments, **options)


def _package_of(frame: FrameType | None) -> str:
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _NOBODY:
            return package
        frame = frame.f_back
    return ""


_heard = False


class Lives:
    """Watches Accelerators that begin and end one after the other: a later one leaves nothing.

    What a library does where it is first used is its own: the first life is the measure.

    Args:
        measure: so many lives are the measure of what is held.
        places: where files may be left; default: the folder of the checks.
        whose: the package whose threads and files count; default: those of any.
    """

    def __init__(
        self, ctx: CheckContext, measure: int = 1, places: Sequence[Path] = (), whose: str = ""
    ) -> None:
        global _heard
        if not _heard:
            _heard = True
            sys.addaudithook(_hear)
        self.ctx = ctx
        self.measure = measure
        self.whose = whose
        self.places = [os.path.join(os.path.abspath(one), "") for one in places or [ctx.folder]]
        self._held: list[list[str]] = []
        self._files: dict[str, str] = {}
        self._printed = io.StringIO()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Live once; the check's Accelerators end with it."""
        import torch

        global _written
        later = bool(self._held)
        save = functools.partial(_save, torch.save)
        _written = self._files if later else None
        try:
            with (
                contextlib.redirect_stdout(self._printed if later else sys.stdout),
                mock.patch.object(torch, "save", save),
            ):
                yield
                self.ctx.end()
        finally:
            _written = None
        self._held.append(held_now(self.whose))

    def check(self) -> None:
        """Fail where a later life has left anything."""
        if not self.ctx.options.get("prints", False):
            said = self._printed.getvalue()
            self.ctx.equal(said, "", "what it prints where the script prints (options: prints)")
        left = still_held(self._held[self.measure - 1], self.whose)
        left += [f"file {path}" for path in self._left_files()]
        assert not left, f"left of an Accelerator that has ended: {', '.join(left)}"

    def _left_files(self) -> list[str]:
        return [
            path
            for path, package in self._files.items()
            if not os.path.join(path, "").startswith((*self.places, *_DEVICES))
            and self.whose in ("", package)
            and not _CACHES & {*Path(path).parts}
            and os.path.exists(path)
        ]


class Started:
    """The threads that would hold this process, its processes, and after which check each was there."""

    def __init__(self) -> None:
        self._since: dict[Any, str] = dict.fromkeys(self._running(), "")

    def note(self, name: str) -> None:
        """Keep what is there after a check for the first time."""
        for one in self._running():
            self._since.setdefault(one, name)

    def left(self) -> dict[str, Any]:
        """Return the threads that do not end, and the processes, each with its check."""
        until = time.monotonic() + _GRACE
        threads, processes = {}, {}
        for one, name in self._since.items():
            if not name:
                continue
            if isinstance(one, psutil.Process):
                with contextlib.suppress(psutil.Error):  # it has ended
                    processes[" ".join(one.cmdline())] = name
                continue
            one.join(max(0.0, until - time.monotonic()))
            if one.is_alive():
                threads[f"thread {one.name!r} of {_code(one)}, which is no daemon"] = name
        return {"threads": threads, "processes": processes}

    @staticmethod
    def _running() -> list[Any]:
        threads = [one for one in threading.enumerate() if not (one.daemon or _ends(one))]
        with contextlib.suppress(AttributeError):  # not on macOS
            try:
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # there is none; to look for them takes milliseconds
                return threads
        return [*threads, *psutil.Process().children(recursive=True)]


def _ends(thread: threading.Thread) -> bool:
    """Tell whether the interpreter itself ends a thread: those of executors."""
    return thread is threading.main_thread() or _code(thread) == "concurrent.futures.thread"


@check(*SUITE_KINDS, after=True)
def exits(ctx: CheckContext) -> None:
    """The processes of the checks end by themselves, and nothing they have started goes on."""
