"""A lock for stores that have none: a small file that its holder renews.

The file says which process holds it and until when. On the machine of the holder the process is
looked up, so what it left when it was killed is free at once. Elsewhere the time decides.
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

LEASE = ".lease"

#: Seconds between two renewals, and for how long one of them holds.
RENEWED, HOLDS = 60.0, 600.0

#: Seconds before a lease that cannot be parsed is read again: its holder may be writing it.
_AGAIN = 0.5

logger = logging.getLogger(__name__)


@contextmanager
def hold_lease(storage: Store, place: str, save: str) -> Iterator[bool]:
    """Hold the lease of a save in the block; False if another process that may live holds it.

    Args:
        storage: where the lease is kept, among the files of the save.
        place: of the checkpoint.
        save: name of the save.
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
            except Exception as error:  # the next one may succeed before the lease runs out
                logger.warning("The lease of %s/%s was not renewed: %s", place, save, error)

    thread = threading.Thread(target=renew, name="checkpoint lease", daemon=True)
    thread.start()
    try:
        yield True
    finally:
        released.set()
        thread.join()
        with suppress(Exception):  # it runs out by itself
            storage.delete(place, name)


def _write(storage: Store, place: str, name: str) -> None:
    text = json.dumps({**_this_process(), "expires": time.time() + HOLDS})
    with tempfile.TemporaryDirectory(prefix="accelerate-lease-") as folder:
        source = Path(folder, "lease")
        source.write_text(text, encoding="utf-8")
        storage.write(place, name, source, lambda count: None)


def _is_held(storage: Store, place: str, name: str) -> bool:
    for pause in (_AGAIN, 0.0):
        try:
            return _may_live(json.loads(storage.read(place, name)))
        except FileNotFoundError:
            return False
        except (ValueError, KeyError, TypeError):
            time.sleep(pause)
    return False


def _may_live(holder: dict[str, Any]) -> bool:
    here = _this_process()
    if here["machine"] and holder["machine"] == here["machine"]:
        return _started(int(holder["pid"])) == str(holder["started"])
    return float(holder["expires"]) > time.time()


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {"machine": _machine(), "pid": pid, "started": _started(pid)}


def _machine() -> str:
    """Return a name of this machine and its numbering of processes, "" where there is none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return f"{socket.gethostname()} {boot} {namespace}"


def _started(pid: int) -> str:
    """Return when a process was started, so that another one of its number is told apart."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "gone"
    state, *fields = text.rpartition(")")[2].split()
    return "gone" if state in "ZX" else fields[18]
