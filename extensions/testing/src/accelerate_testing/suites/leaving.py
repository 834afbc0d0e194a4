"""What a plugin leaves behind: threads, processes, files and output."""

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

#: Seconds in which threads and processes may end after they were asked to.
_GRACE = 2.0
#: Folders of caches and settings, in which any library may write.
_CACHES = {"__pycache__", ".cache", ".config", ".local"}
_DEVICES = ("/dev/", "/proc/", "/sys/")
#: Packages whose frames are skipped in the search for the package that writes a file.
_NOBODY = {*sys.stdlib_module_names, "accelerate_core", "accelerate_tracking", "accelerate_testing"}


def held_now(whose: str = "") -> list[str]:
    """Return the threads, child processes and open files of this process.

    Args:
        whose: the package whose threads count; default: all packages.
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
    """Return the module of the code that a thread runs."""
    return str((getattr(thread, "_target", None) or type(thread)).__module__)


def still_held(earlier: Sequence[str], whose: str = "") -> list[str]:
    """Return what exists now but did not earlier, after a short time in which it may end."""
    until = time.monotonic() + _GRACE
    while True:
        left = [one for one in held_now(whose) if one not in earlier]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.05)


#: During a later life: path -> the package that wrote there.
_written: dict[str, str] | None = None


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    """Record which package of this process opens a file for writing."""
    if _written is None or event not in ("open", "os.mkdir", "os.rename"):
        return
    path = arguments[event == "os.rename"]
    if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
        return
    if isinstance(path, str | bytes | os.PathLike):
        _written[os.path.abspath(os.fsdecode(path))] = _package_of(sys._getframe(1))


def _save(save: Any, what: Any, target: Any, *arguments: Any, **options: Any) -> Any:
    """Call `torch.save`, which opens files without an audit event."""
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
    """Watches Accelerators that start and end one after another: later ones must leave nothing.

    A library may create something when it is first used, so later lives are compared with the first.

    Args:
        measure: the number of lives with which the later ones are compared.
        places: where files may be left; default: the folder of the checks.
        whose: the package whose threads and files count; default: all packages.
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
        """Run one life; the Accelerators of the check end with it."""
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
        """Fail if a later life has left anything."""
        if not self.ctx.options.get("prints", False):
            said = self._printed.getvalue()
            self.ctx.equal(said, "", "its output to stdout (option: prints)")
        left = still_held(self._held[self.measure - 1], self.whose)
        until = time.monotonic() + _GRACE  # another rank may still be removing what they share
        while self._left_files() and time.monotonic() < until:
            time.sleep(0.05)
        left += [f"file {path}" for path in self._left_files()]
        assert not left, f"left behind by an Accelerator that has ended: {', '.join(left)}"

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
    """Non-daemon threads and child processes, with the check after which each was first seen."""

    def __init__(self) -> None:
        self._since: dict[Any, str] = dict.fromkeys(self._running(), "")

    def note(self, name: str) -> None:
        """Record what exists after a check for the first time."""
        for one in self._running():
            self._since.setdefault(one, name)

    def left(self) -> dict[str, Any]:
        """Return the threads that don't end, and the processes, each with its check."""
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
                threads[f"thread {one.name!r} of {_code(one)}, which is not a daemon"] = name
        return {"threads": threads, "processes": processes}

    @staticmethod
    def _running() -> list[Any]:
        threads = [one for one in threading.enumerate() if not (one.daemon or _ends(one))]
        with contextlib.suppress(AttributeError):  # not on macOS
            try:
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # there are none; searching for them would take milliseconds
                return threads
        return [*threads, *psutil.Process().children(recursive=True)]


def _ends(thread: threading.Thread) -> bool:
    """Return whether the interpreter itself ends a thread, as it does with those of executors."""
    return thread is threading.main_thread() or _code(thread) == "concurrent.futures.thread"


@check(*SUITE_KINDS, after=True)
def exits(ctx: CheckContext) -> None:
    """The processes of the checks end by themselves, and nothing that they started keeps running."""
