"""Find out through the store whether every rank has called a save, before the first collective.

Many scripts save inside `if accelerator.is_main_process:`. A collective there would hang, or would be
matched with an unrelated collective of the other ranks. The store has neither problem: each rank
announces its call, and the main process decides once per save whether all ranks save together.
"""

from __future__ import annotations

import hashlib
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

#: Seconds that the main process waits for the other ranks if it can save alone.
ALONE = 5.0
#: The same at a line of the script where they were late before.
LATE = 60.0
#: The same if the main process cannot save alone.
SHARDED = 60.0

#: Seconds that the other ranks wait for the main process if the process group has no timeout.
_MAIN = 1800.0

TOGETHER = "together"
BY_MAIN = "by the main process"
REFUSED = "refused"


@dataclass(frozen=True)
class Call:
    """One rank's call of a save, in values that JSON can represent.

    Attributes:
        verb: `save_state` or `save_model`.
        directory: the target.
        done: number of steps and of backwards so far, which is the same on all ranks at the same save.
        place: the lines of the user's code that led here, innermost first.
    """

    verb: str
    directory: str
    done: list[int]
    place: list[str]

    @classmethod
    def here(cls, verb: str, directory: str, done: Sequence[int]) -> Call:
        """Return the call that this rank is making now."""
        frames = [f for f, _ in traceback.walk_stack(sys._getframe(1)) if of_the_user(f)]
        place = [f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in frames]
        return cls(verb, directory, [*done], place)

    @property
    def description(self) -> str:
        return f"{self.verb} in {self.place[0]}" if self.place else self.verb

    def text(self) -> str:
        return json.dumps(vars(self))

    def digests(self) -> list[str]:
        """Return two digests. Calls that have one of them in common meet."""
        parts = [self.verb, *self.place], [self.verb, self.directory]
        return [hashlib.sha256(json.dumps(part).encode()).hexdigest() for part in parts]

    def meets(self, other: Call) -> bool:
        """Return whether the calls of two ranks belong to the same save."""
        there = self.place == other.place or self.directory == other.directory
        return self.verb == other.verb and there


class Rendezvous:
    """Matches the saves of one process, by number, with those of the other ranks."""

    _made: weakref.WeakKeyDictionary[Any, Rendezvous] = weakref.WeakKeyDictionary()

    def __init__(self, process: Any) -> None:
        self._store: Any = dist.PrefixStore("save", process.store)
        self._rank, self._process = process.process_index, process
        self._count = process.num_processes
        self._number = 0
        #: Place -> keys of the ranks that were missing when the main process saved alone there.
        self._alone: dict[tuple[str, ...], list[str]] = {}

    @classmethod
    def of(cls, process: Any) -> Rendezvous | None:
        """Return the rendezvous shared by all Accelerators of a process, or None without a store."""
        if process.num_processes == 1 or process.store is None:
            return None
        if process.store not in cls._made:
            cls._made[process.store] = cls(process)
        return cls._made[process.store]

    def together(self, call: Call, whole: bool) -> bool:
        """Return True if all ranks save together, False if the main process saves alone.

        Args:
            whole: whether the main process can save alone.

        Raises:
            CheckpointError: the main process cannot save alone and the others did not call, or
                the main process itself did not call.
        """
        return self._decide(call, whole) if self._rank == 0 else self._ask(call)

    def _announce(self, number: int, call: Call) -> None:
        """Announce this rank's call of save `number`. The last rank to come decides if all calls meet.

        Ranks count themselves under the digests of their calls. So no rank reads the calls of all others,
        unless some are missing or different.
        """
        self._store.set(f"{number}/{self._rank}", call.text())
        counters = [f"{number}/alike/{digest}" for digest in call.digests()]
        for counter in counters:
            self._store.add(counter, 1)
        if self._store.add(f"{number}/arrived", 1) < self._count:
            return
        if any(self._store.add(counter, 0) == self._count for counter in counters):
            self._store_verdict(number, call, TOGETHER, [])
        else:
            self._store.set(f"{number}/different", "1")

    def _store_verdict(
        self, number: int, call: Call, verdict: str, missing: Sequence[int]
    ) -> tuple[str, Call, list[int]]:
        """Store the verdict on a save unless there is one, and return the stored one."""
        text = json.dumps([verdict, call.text(), missing])
        found = self._store.compare_set(f"{number}/verdict", "", text)
        return self._verdict(found)

    @staticmethod
    def _verdict(text: bytes) -> tuple[str, Call, list[int]]:
        verdict, call, missing = json.loads(text)
        return verdict, Call(**json.loads(call)), missing

    def _decide(self, call: Call, whole: bool) -> bool:
        number, place = self._number, tuple(call.place)
        self._number += 1
        wait = self._patience(place) if whole else SHARDED
        self._announce(number, call)
        decided, different = f"{number}/verdict", f"{number}/different"
        self._wait([decided, different], wait, drain_device=True)
        missing: list[int] = []
        verdict = TOGETHER
        if not self._store.check([decided]):
            came = {rank: self._read(f"{number}/{rank}") for rank in range(1, self._count)}
            missing = [rank for rank, theirs in came.items() if not (theirs and call.meets(theirs))]
            if missing:
                verdict = BY_MAIN if whole else REFUSED
        # The last rank may have come at this moment, and then its verdict is the one that counts.
        verdict, _, missing = self._store_verdict(number, call, verdict, missing)
        if verdict == REFUSED:
            raise CheckpointError(_refusal(call, missing))
        if verdict == TOGETHER:
            self._alone.pop(place, None)
            return True
        if wait:
            warn(
                f"The main process called {call.verb} here, but {_ranks(missing)} did not within "
                f"{wait:.0f} s, so the main process saves alone. The checkpoint has no random states "
                "and no accumulated gradients of the other ranks. To save these too, call "
                f"{call.verb} on every rank. The main process will not wait at this line again."
            )
        self._alone[place] = [f"{number}/{rank}" for rank in missing]
        return False

    def _patience(self, place: tuple[str, ...]) -> float:
        """Return how long to wait at a place: longer if all missing ranks called it late before."""
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
            self._announce(number, call)
            if not self._wait([f"{number}/verdict"], seconds):
                raise CheckpointError(
                    f"Rank {self._rank} called {call.description}, but the main process did not "
                    f"within {seconds:.0f} s. All ranks must call it."
                )
            verdict, theirs, missing = self._verdict(self._store.get(f"{number}/verdict"))
            if verdict == TOGETHER:
                return True
            if not call.meets(theirs) or call.done != theirs.done:
                continue  # another save, which the main process made alone
            if verdict == REFUSED:
                raise CheckpointError(_refusal(theirs, missing))
            warn(
                f"The main process stopped waiting for {_ranks(missing)} and saved alone, so the "
                f"checkpoint {theirs.directory} has no random state and no accumulated gradients of "
                f"rank {self._rank}."
            )
            return False

    def _read(self, key: str) -> Call | None:
        return Call(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _wait(self, keys: list[str], seconds: float, drain_device: bool = False) -> bool:
        """Wait until one of the keys exists. Poll, because waiting in the store blocks other threads."""
        until, pause = time.monotonic() + seconds, 0.0005
        longest = max(
            0.05, self._count / 50_000
        )  # so that thousands of ranks don't flood the store
        while not any(self._store.check([key]) for key in keys):
            if drain_device and self._process.device.type != "cpu":
                # Work queued on the device may wait for the other ranks. Don't count that time.
                synchronize(self._process.device)
                until, drain_device = time.monotonic() + seconds, False
            if time.monotonic() >= until:
                return False
            time.sleep(pause)
            pause = min(pause * 1.2, longest)
        return True


def synchronize(device: torch.device) -> None:
    """Wait for the work queued on a device. Does nothing for devices without queues."""
    module: Any = getattr(torch, device.type, None)
    if hasattr(module, "synchronize"):
        module.synchronize()


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _refusal(call: Call, missing: Sequence[int]) -> str:
    return (
        f"The main process called {call.description}, but {_ranks(missing)} did not within "
        f"{SHARDED:.0f} s. Each rank holds a part of the state, so all ranks must call it: move it "
        "out of blocks that only some ranks run."
    )
