"""Whether every rank comes to a save, asked through the store before the first collective.

Many scripts save in `if accelerator.is_main_process:`. In a collective the main process would wait
there for ever, and what the others enter next would meet it. In the store nothing is half entered:
each rank says that it has come, and the main process alone decides, once for each of its saves,
whether all make it together.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from accelerate_core.plugin import CheckpointError, of_the_user, warn

#: Seconds the main process waits for the others if it can save alone.
ALONE = 5.0
#: The same at a line where they came late before.
LATE = 60.0
#: The same if it cannot save alone.
SHARDED = 60.0

#: Seconds the others wait for the main process where the group has no limit of its own.
_MAIN = 1800.0

TOGETHER = "together"
BY_MAIN = "by the main process"
REFUSED = "refused"


@dataclass(frozen=True)
class Call:
    """One call of a save by one rank, in values that go through JSON.

    Attributes:
        verb: `save_state` or `save_model`.
        directory: where to.
        done: steps and backwards so far; ranks at the same save have done as many.
        place: the lines of the user's that led here, the nearest first.
    """

    verb: str
    directory: str
    done: list[int]
    place: list[str]

    @classmethod
    def here(cls, verb: str, directory: str, done: Sequence[int]) -> Call:
        """Return the call that is under way."""
        frames = [f for f, _ in traceback.walk_stack(sys._getframe(1)) if of_the_user(f)]
        place = [f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in frames]
        return cls(verb, directory, [*done], place)

    @property
    def description(self) -> str:
        return f"{self.verb} in {self.place[0]}" if self.place else self.verb

    def text(self) -> str:
        return json.dumps(vars(self))

    def meets(self, other: Call) -> bool:
        """Whether the calls of two ranks that are both here are one save."""
        there = self.place == other.place or self.directory == other.directory
        return self.verb == other.verb and there


class Rendezvous:
    """The saves of one process, by number; `of` returns the one of a process."""

    _made: weakref.WeakKeyDictionary[Any, Rendezvous] = weakref.WeakKeyDictionary()

    def __init__(self, process: Any) -> None:
        self._store: Any = dist.PrefixStore("save", process.store)
        self._rank, self._process = process.process_index, process
        self._others = range(1, process.num_processes)
        self._number = 0
        #: Place -> the keys of those who were missing when a save was made alone there.
        self._alone: dict[tuple[str, ...], list[str]] = {}

    @classmethod
    def of(cls, process: Any) -> Rendezvous | None:
        """Return that of a process, whatever Accelerator saves; None without a store of all ranks."""
        if process.num_processes == 1 or process.store is None:
            return None
        if process.store not in cls._made:
            cls._made[process.store] = cls(process)
        return cls._made[process.store]

    def together(self, call: Call, whole: bool) -> bool:
        """Return whether all ranks make this save; if not, the main process makes it alone.

        Args:
            whole: whether the main process can save alone.

        Raises:
            CheckpointError: it cannot, and the others did not come; or it did not come itself.
        """
        return self._decide(call, whole) if self._rank == 0 else self._ask(call)

    def _decide(self, call: Call, whole: bool) -> bool:
        number, place = self._number, tuple(call.place)
        self._number += 1
        wait = self._patience(place) if whole else SHARDED
        self._wait([f"{number}/{rank}" for rank in self._others], wait, drain_device=True)
        came = {rank: self._read(f"{number}/{rank}") for rank in self._others}
        missing = [rank for rank, theirs in came.items() if not (theirs and call.meets(theirs))]
        verdict = TOGETHER
        if missing:
            verdict = BY_MAIN if whole else REFUSED
        self._store.set(f"{number}/verdict", json.dumps([verdict, call.text(), missing]))
        if verdict == REFUSED:
            raise CheckpointError(_refusal(call, missing))
        if verdict == TOGETHER:
            self._alone.pop(place, None)
            return True
        if wait:
            warn(
                f"{call.verb} was called here by the main process, and not by "
                f"{_ranks(missing)} within {wait:.0f} s: the main process saves alone. Random states "
                "and gradients of a begun cycle of the other ranks are left out; to have them, call "
                "it on every rank. It does not wait at this line again."
            )
        self._alone[place] = [f"{number}/{rank}" for rank in missing]
        return False

    def _patience(self, place: tuple[str, ...]) -> float:
        """Return how long to wait at a place: longer if all who were missing there came late."""
        if place not in self._alone:
            return ALONE
        came = [self._read(key) for key in self._alone[place]]
        return LATE if all(one and tuple(one.place) == place for one in came) else 0.0

    def _ask(self, call: Call) -> bool:
        limit = self._process.timeout
        seconds = _MAIN if limit is None else limit.total_seconds()
        while True:
            number = self._number
            self._number += 1
            self._store.set(f"{number}/{self._rank}", call.text())
            if not self._wait([f"{number}/verdict"], seconds):
                raise CheckpointError(
                    f"Rank {self._rank} is at {call.description}, and the main process did not come to it "
                    f"within {seconds:.0f} s. All ranks have to call it."
                )
            verdict, text, missing = json.loads(self._store.get(f"{number}/verdict"))
            theirs = Call(**json.loads(text))
            if verdict == TOGETHER:
                return True
            if not call.meets(theirs) or call.done != theirs.done:
                continue  # the main process made that one alone, and this rank had no part in it
            if verdict == REFUSED:
                raise CheckpointError(_refusal(theirs, missing))
            warn(
                f"The main process did not wait longer for {_ranks(missing)} and saved alone: the "
                f"checkpoint {theirs.directory} has no random state and no gradients of a begun "
                f"cycle of rank {self._rank}."
            )
            return False

    def _read(self, key: str) -> Call | None:
        return Call(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _wait(self, keys: list[str], seconds: float, drain_device: bool = False) -> bool:
        """Wait for keys; in short sleeps, as a wait in the store keeps other threads out of it."""
        until, pause = time.monotonic() + seconds, 0.0005
        while not self._store.check(keys):
            if drain_device and self._process.device.type != "cpu":
                # What is queued on the device waits for the others: it is no time of theirs.
                synchronize(self._process.device)
                until, drain_device = time.monotonic() + seconds, False
            if time.monotonic() >= until:
                return False
            time.sleep(pause)
            pause = min(pause * 1.2, 0.05)
        return True


def synchronize(device: torch.device) -> None:
    """Wait for what is queued on a device; one without queues that torch knows has copied already."""
    module: Any = getattr(torch, device.type, None)
    if hasattr(module, "synchronize"):
        module.synchronize()


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _refusal(call: Call, missing: Sequence[int]) -> str:
    return (
        f"{call.description} was called by the main process, and not by {_ranks(missing)} within "
        f"{SHARDED:.0f} s. Each rank holds a part of what is saved here, so all of them have to call "
        "it: take it out of blocks that only some of them run."
    )
