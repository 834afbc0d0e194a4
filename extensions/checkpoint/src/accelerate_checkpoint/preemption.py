"""Save and exit when the machine is about to be preempted.

A signal may reach only some ranks, and each of them at a different step. A rank that receives one
announces it in the store. Every rank then announces the next step boundary at which it can still
stop, and waits there until all boundaries are known. All ranks save at the last one. Without a
signal, a boundary costs one comparison, and no rank waits for another.

A launcher also sends SIGTERM to the other ranks when one has failed. They cannot save without it, so
they end at once.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from accelerate_checkpoint.lease import has_ended, this_process
from accelerate_core.plugin import ConfigurationError, did_you_mean, listing, without_credentials

if TYPE_CHECKING:
    from accelerate_checkpoint.training_state import TrainingState

#: `EX_TEMPFAIL` in sysexits.h: try again later.
EXIT_STATUS = 75

#: Seconds between two checks of the store by the background thread.
_LOOK = 0.5

#: Seconds in which the main thread handles the signal that ends it. It may be waiting in C++.
_GRACE = 2.0

#: Before the launcher stops the ranks because one has failed, it writes which one to this file, next to
#: the rank's error file (`accelerate_launch.failures.tell_others`).
_FAILED_SUFFIX = ".failed"

logger = logging.getLogger(__name__)


class Preempted(SystemExit):
    """The run has saved its state and exits, so that it can be restarted."""

    def __init__(self, directory: str) -> None:
        super().__init__(EXIT_STATUS)
        self.directory = directory


def read_signals(text: str | None) -> list[signal.Signals]:
    """Return the signals named in `text`, such as "SIGTERM,SIGUSR1".

    Raises:
        ConfigurationError: a name is not a signal, or the signal cannot be caught.
    """
    names = [part.strip().upper() for part in (text or "").split(",") if part.strip()]
    known = {one.name: one for one in signal.Signals}
    found = []
    for name in names:
        full = name if name.startswith("SIG") else f"SIG{name}"
        if full not in known or full in ("SIGKILL", "SIGSTOP"):
            usual = ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP"]
            raise ConfigurationError(
                f"preemption_signals: {name!r} is not a signal that a process can catch. Common "
                f"signals are {listing(usual)}.{did_you_mean(full, usual)}"
            )
        found.append(known[full])
    return found


class Preemption:
    """Waits for a signal, then saves a checkpoint at a step boundary and ends the run.

    Args:
        wait: waits for the current background save.
        save: saves a checkpoint and returns its directory.
    """

    def __init__(
        self,
        state: TrainingState,
        signals: list[signal.Signals],
        wait: Callable[[], None],
        save: Callable[[], str],
    ) -> None:
        self._state = state
        self._wait = wait
        self._save = save
        process = state.process
        self._rank = process.process_index
        # Without a store shared by all ranks, each rank is signalled and exits independently.
        self._ranks = range(process.num_processes) if process.store else [self._rank]
        self._store: Any = dist.PrefixStore("preemption", process.store or dist.HashStore())
        self._asked = threading.Event()
        self._known = threading.Event()
        self._stop = False
        self._left = False
        #: Whether the main thread waits for the other ranks, and whether it saves with them.
        self._waiting = False
        self._saving = False
        self._ending = False
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        self._failed = Path(error_file + _FAILED_SUFFIX) if error_file else None
        self._lock = threading.Lock()
        self._steps = 0
        self._boundaries = 0
        self._hold: int | None = None
        self._target = 0
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError(
                "preemption_signals is set, but this Accelerator is not created in the main "
                "thread, and only the main thread can handle signals. Create it there, or remove "
                "the setting."
            )
        self._store.set(f"process/{self._rank}", json.dumps(this_process()))
        self._before = {one: signal.signal(one, self._on_signal) for one in signals}
        self._number = signal.SIGTERM if signal.SIGTERM in signals else signals[0]
        self._thread = threading.Thread(target=self._watch, name="preemption", daemon=True)
        self._thread.start()
        state.events.loop_body_end = self.loop_body_end

    @property
    def requested(self) -> bool:
        """Whether this rank knows that some rank has received a signal."""
        return self._asked.is_set()

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._ending:
            # An exception could be caught, or be raised while another one is handled.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._asked.set()

    def loop_body_end(self) -> None:
        """Handle the end of one iteration of the training loop. Save and exit if it is time.

        Raises:
            ConfigurationError: some rank did not answer within the timeout of collectives.
        """
        steps = self._state.events.steps
        if steps == self._steps:
            return  # no optimizer step: an evaluation loop, or the middle of a cycle
        self._steps = steps
        with self._lock:
            self._boundaries += 1
            hold = self._hold
        if hold is None or self._boundaries < hold:
            return
        limit = self._state.process.timeout
        self._waiting = True
        if not self._known.wait(None if limit is None else limit.total_seconds()):
            raise ConfigurationError(
                "A signal asked this run to save and exit, but some ranks did not report a step "
                "boundary in time. Check that every rank is still training."
            )
        self._waiting = False
        if self._boundaries >= self._target:
            self._leave()

    def _leave(self) -> None:
        self._left = True
        self._saving = True
        self.close()
        try:
            self._wait()
        except Exception as error:  # an earlier save failed; still try the final one
            logger.warning("An earlier save in the background failed: %s", error)
        try:
            directory = self._save()
            with suppress(Exception):  # rank 0, which may hold the store, has saved and left
                self._store.set(f"saved/{self._rank}", "1")
        finally:
            self._saving = False
        if self._rank == 0:
            shown = without_credentials(directory)
            logger.warning("Preempted: the state was saved to %s.", shown)
        self._state.end_training()
        raise Preempted(directory)

    def _watch(self) -> None:
        try:
            while not self._asked.wait(_LOOK):
                if self._stop:
                    return
                self._end_if_stopped()
                if self._store.check(["asked"]):
                    self._asked.set()
            if self._stop:
                return
            self._end_if_stopped()
            self._store.set("asked", "1")
            with self._lock:
                self._hold = self._boundaries + 1
            self._store.set(f"hold/{self._rank}", str(self._hold))
            self._follow()
        except Exception as error:
            if self._waiting and not self._known.is_set():
                self._end(f"The store of the run is gone ({error}), because rank 0 has ended.")
            logger.debug("preemption: %s", error)  # the run has ended

    def _follow(self) -> None:
        """Find the boundary of all ranks. Until this rank has saved, notice ranks that have ended."""
        names = [f"hold/{rank}" for rank in self._ranks]
        while self._saving or not self._stop:
            self._end_if_stopped()
            if not self._known.is_set() and self._store.check(names):
                self._target = max(int(self._store.get(name)) for name in names)
                self._known.set()
            # Otherwise this rank may be past its loop, and the others may have finished.
            if (self._waiting and not self._known.is_set()) or self._saving:
                self._end_if_alone()
            time.sleep(_LOOK / 10)

    def _end_if_stopped(self) -> None:
        """End this process if the launcher stops it because another rank has failed."""
        if self._failed is not None and self._failed.exists():
            time.sleep(_LOOK / 10)  # the launcher may still be writing it
            self._end(self._failed.read_text(encoding="utf-8"))

    def _end_if_alone(self) -> None:
        """End this process if it waits for a rank that has ended without saving."""
        if self._store.check(["alone"]):
            self._end(self._store.get("alone").decode())
        for rank in self._ranks:
            if rank == self._rank or not self._store.check([f"process/{rank}"]):
                continue
            process = json.loads(self._store.get(f"process/{rank}"))
            # A rank announces its save before it ends, so this order matters.
            if has_ended(process) and not self._store.check([f"saved/{rank}"]):
                text = f"Rank {rank} (process {process['pid']}) has ended without saving."
                self._store.set("alone", text)  # ranks on other machines cannot look for it
                self._end(text)

    def _end(self, reason: str) -> None:
        """Print why the run cannot be saved, unless another rank has, and end this process."""
        first = True
        with suppress(Exception):  # the store may be gone
            first = self._store.add("ending", 1) == 1
        if first:
            logger.error(
                "%s All ranks save together, so the signal to rank %s cannot be followed by a "
                "checkpoint. The run ends without one.",
                reason,
                self._rank,
            )
        self._ending = True
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(threading.main_thread().ident or 0, self._number)
            time.sleep(_GRACE)
        os._exit(128 + self._number)

    def close(self) -> None:
        """Stop watching and restore the previous signal handlers."""
        if self.requested and not self._left:
            self._state.warn_once(
                "A signal asked this run to save and exit, but the run reached no step boundary "
                "after it, so nothing was saved. A step boundary is where the loop over a "
                "prepared loader asks for its next batch after an optimizer step."
            )
            self._left = True
        self._stop = True
        self._state.events.loop_body_end = None
        if threading.current_thread() is threading.main_thread():
            for one, before in self._before.items():
                signal.signal(one, before)
