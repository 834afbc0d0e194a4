"""A lock for stores without locks: a small file that its holder renews.

The file names the process that holds the lease and says when the lease expires. On the holder's own
machine, the process is looked up, so the lease is free as soon as its holder was killed. On other
machines, it is free when it has expired.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from accelerate_checkpoint.store import Store
from accelerate_core.plugin import parse_json, without_credentials

LEASE = ".lease"

#: Seconds between two renewals, and seconds for which a renewal is valid.
RENEWED, HOLDS = 60.0, 600.0

#: Seconds before a lease that cannot be parsed is read again. Its holder may be writing it.
_AGAIN = 0.5

logger = logging.getLogger(__name__)


@contextmanager
def hold_lease(storage: Store, place: str, save: str) -> Iterator[bool]:
    """Hold the lease of a save inside the block.

    Args:
        storage: where the lease is kept, next to the files of the save.
        place: address of the checkpoint.
        save: name of the save.

    Yields:
        False, without the lease, if another process holds it and may still be alive.
    """
    name = f"{save}/{LEASE}"
    if _is_held(storage, place, name):
        yield False
        return
    _write(storage, place, name)
    released = threading.Event()

    def renew() -> None:
        while not released.wait(RENEWED):
            try:
                _write(storage, place, name)
            except Exception as error:  # the next renewal may succeed before the lease expires
                address = without_credentials(f"{place}/{save}")
                logger.warning("The lease of %s was not renewed: %s", address, error)

    thread = threading.Thread(target=renew, name="checkpoint lease", daemon=True)
    thread.start()
    try:
        yield True
    finally:
        released.set()
        thread.join()
        with suppress(Exception):  # otherwise the lease expires
            storage.delete(place, name)


def _write(storage: Store, place: str, name: str) -> None:
    text = json.dumps({**this_process(), "expires": time.time() + HOLDS})
    with tempfile.TemporaryDirectory(prefix="accelerate-lease-") as folder:
        source = Path(folder, "lease")
        source.write_text(text, encoding="utf-8")
        storage.write(place, name, source, lambda count: None)


def _is_held(storage: Store, place: str, name: str) -> bool:
    for pause in (_AGAIN, 0.0):
        try:
            return _may_live(parse_json(storage.read(place, name)))
        except FileNotFoundError:
            return False
        except (ValueError, KeyError, TypeError, OverflowError):
            time.sleep(pause)
    return False


def _may_live(holder: dict[str, Any]) -> bool:
    if holder["machine"] and holder["machine"] == _machine():
        return not has_ended(holder)
    return float(holder["expires"]) > time.time()


def has_ended(process: dict[str, Any]) -> bool:
    """Return whether a process of this machine has ended; False if it is on another machine.

    Args:
        process: what `this_process` returned there.
    """
    if not process["machine"] or process["machine"] != _machine():
        return False
    return _started(int(process["pid"])) != str(process["started"])


def this_process() -> dict[str, Any]:
    """Describe this process, so that others can find out whether it has ended."""
    pid = os.getpid()
    return {"machine": _machine(), "pid": pid, "started": _started(pid)}


def _machine() -> str:
    """Return an identifier of this machine and its PID namespace, or "" without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return f"{socket.gethostname()} {boot} {namespace}"


def _started(pid: int) -> str:
    """Return when a process was started. This distinguishes it from a later one with its PID."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "gone"
    state, *fields = text.rpartition(")")[2].split()
    return "gone" if state in "ZX" else fields[18]
