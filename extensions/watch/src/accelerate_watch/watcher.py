"""The thread of each rank that notices hangs and answers requests for a report."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from accelerate_watch import flight_recorder, run_folder, stacks
from accelerate_watch.drift import Drift
from accelerate_watch.report import RankState, compose
from accelerate_watch.stragglers import Stragglers

#: Seconds after which an operation of the store fails.
_STORE_TIMEOUT = 10.0
#: The collectives of each group that a rank sends.
_SENT = 8
#: What is known about a silent rank that is alone on its machine.
_ALONE = (
    "does not answer, and no other rank on its machine can say why: it is stopped by a signal, keeps "
    "Python's global lock, or its machine or network is down"
)
#: Seconds between two signs of life in the store, of a rank that is alone on its machine.
_BEAT = 2.0
#: A rank whose last sign of life is not older than this many seconds will answer.
_RECENT = 1.0
#: Ranks for each second between two looks, so that the store gets at most this many requests per second.
_RANKS_PER_SECOND = 1000


class Watcher(threading.Thread):
    """Notices if this rank waits too long, and takes part in reports that any rank requests.

    The ranks communicate through the store of the process group, over a connection of their own.

    Args:
        rank: this process's rank.
        local_rank: its rank on this machine.
        ranks: the number of ranks.
        alone: whether no other rank runs on this machine, where it could look at this one.
        store: a store that only this thread uses.
        folder: where the reports are written for `accelerate-core dump`.
        hang_after: seconds of waiting after which a report is printed; 0 for never.
        timeout: the process group's timeout in seconds; None for torch's default.
        steps: returns the number of steps so far.
        stragglers: compares the speeds of the ranks; None to compare nothing.
        drift: compares facts that must be equal on the ranks; None to compare nothing.
    """

    def __init__(
        self,
        *,
        rank: int,
        local_rank: int,
        ranks: int,
        alone: bool,
        store: Any,
        folder: Path,
        hang_after: float,
        timeout: float | None,
        steps: Callable[[], int],
        stragglers: Stragglers | None,
        drift: Drift | None = None,
    ) -> None:
        super().__init__(name="accelerate-watch", daemon=True)
        self.rank = rank
        self.local_rank = local_rank
        self.ranks = ranks
        self.alone = alone
        self.folder = folder
        self.hang_after = hang_after
        self.timeout = timeout
        self.steps = steps
        self.stragglers = stragglers
        self.drift = drift
        self.interval = min(2.0, max(0.1, (hang_after or 60.0) / 20))
        self.interval = max(self.interval, ranks / _RANKS_PER_SECOND)
        self.host = socket.gethostname()
        self._store = store
        self._store.set_timeout(timedelta(seconds=_STORE_TIMEOUT))
        self._stacks, self._requests = stacks.register(folder, rank)
        self._wake = threading.Event()
        self._reported = threading.Event()
        self._over = False
        #: Whether to compare the last facts before the thread ends.
        self._finishes = False
        #: Why a report is needed at once; "" if none is.
        self._asked = ""
        #: Number of reports so far, and bytes of the file of requests that were read.
        self._number = 0
        self._read = 0
        #: The position of each group that waits, and when it was first seen there.
        self._since: dict[str, tuple[tuple[str, str], float]] = {}
        #: Do not report the same hang again before it has lasted this long.
        self._next_report = hang_after
        #: When this rank last wrote a sign of life to the store.
        self._beat = -_BEAT
        #: Why the store cannot be used any more; "" while it can.
        self._lost = ""

    def wake(self) -> None:
        """Look at once."""
        self._wake.set()

    def stop(self, finish: bool = True) -> None:
        """End the thread.

        Python aborts the process if it exits while the thread is in an operation of the store.

        Args:
            finish: compare the last facts of the ranks first, which may take seconds.
        """
        self._finishes = finish and not self._lost
        self._over = True
        self._wake.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(_STORE_TIMEOUT)

    def report_and_wait(self, why: str) -> None:
        """Request a report, and wait until it was printed; called from another thread."""
        self._reported.clear()
        self._asked = why
        self._wake.set()
        self._reported.wait(3 * self.interval + 8.0)

    def run(self) -> None:
        """Look regularly, until the process ends."""
        member = {"rank": self.rank, "host": self.host, "pid": os.getpid(), "stacks": self._stacks}
        try:
            self._store.append("members", json.dumps(member) + "\n")
        except Exception:  # the run ended at once
            return
        while not self._over:
            pause = self.interval if self.drift is None else self.drift.pause()
            self._wake.wait(min(self.interval, pause))
            self._wake.clear()
            if self._over:
                break
            try:
                if self._lost:
                    self._report_lost_store()
                else:
                    self._look()
            except Exception as error:
                # The process that hosts the store has ended or hangs. Each further attempt would make
                # torch print a C++ stack.
                self._lost = str(error).splitlines()[0]
        if self._finishes and self.drift is not None:
            with contextlib.suppress(Exception):  # the process that hosts the store has ended
                self.drift.finish(self._store)

    # --- every interval -----------------------------------------------------------------------

    def _look(self) -> None:
        now = time.monotonic()
        waited = self._longest_wait(now)
        run_folder.write_beat(self.folder, self.rank, self.steps())
        if self.alone and now - self._beat >= _BEAT:
            self._beat = now
            self._store.set(f"beat/{self.rank}", run_folder.format_beat(self.steps()))
        if self.stragglers is not None:
            self._compare_speeds(now, waited)
        if self.drift is not None:
            self.drift.look(self._store)
        why = self._asked or self._requested()
        if not why and self.hang_after and waited >= self._next_report:
            why = f"a collective has not completed for {waited:.0f} s"
            self._next_report *= 4
        current = self._store.add("reports", 0)
        if current == self._number and why:
            # Ranks that notice the hang at the same time start the same report.
            first = self._store.add(f"{self._number}/claimed", 1) == 1
            current = self._store.add("reports", 1) if first else self._number + 1
        if current > self._number:
            self._number = current
            self._take_part(why)

    def _longest_wait(self, now: float) -> float:
        positions = flight_recorder.pending_positions()
        self._since = {
            group: self._since[group]
            if self._since.get(group, (None,))[0] == position
            else (position, now)
            for group, position in positions.items()
        }
        waited = max((now - since for _, since in self._since.values()), default=0.0)
        if waited < self.hang_after:
            self._next_report = self.hang_after
        return waited

    def _requested(self) -> str:
        if not self._requests.exists() or self._requests.stat().st_size == self._read:
            return ""
        text = self._requests.read_bytes()
        new = text[self._read :]
        self._read = len(text)
        by = "accelerate-core dump" if stacks.REQUEST in new else "SIGUSR2"
        return f"a report was requested by {by}"

    def _report_lost_store(self) -> None:
        waited = self._longest_wait(time.monotonic())
        # One rank of each machine is enough. The store's machine is usually that of rank 0.
        speaks = self.local_rank == 0 or self.rank == 1
        if not (speaks and self.hang_after) or waited < self._next_report:
            return
        self._next_report *= 4
        self._print(
            f"accelerate-watch: rank {self.rank} has waited for {waited:.0f} s in a collective, and "
            f"the store that all ranks share does not answer either. Rank 0 or the launcher on its "
            f"machine hosts it, and has stopped, ended or lost its network. ({self._lost})\n"
            + "\n".join([f"  Rank {self.rank}, step {self.steps()}:", *stacks.own_stack(), ""])
        )

    # --- reports ------------------------------------------------------------------------------

    def _take_part(self, why: str) -> None:
        number = self._number
        self._answer(self._own_state(why), number)
        # The thread of another rank looks once per interval.
        self._pause(self.interval + 0.5 + 0.2 * self.local_rank)
        answered = self._answered(number)
        self._describe_silent_neighbours(number, answered)
        if self.rank != 0:
            self._pause(1.0)  # rank 0 reports if it can
        mine = self.rank == 0 or (0 not in answered and self.rank == min(answered))
        if mine and self._store.add(f"{number}/reporter", 1) == 1:
            text = self._compose(number)
            self._store.set(f"{number}/text", text)
            self._print(text)
        if self.local_rank == 0 or self._asked or why:
            self._keep(number)
        self._asked = ""
        self._reported.set()

    def _pause(self, seconds: float) -> None:
        """Sleep, and give signs of life meanwhile."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            run_folder.write_beat(self.folder, self.rank, self.steps())
            time.sleep(min(left, _RECENT / 4))

    def _own_state(self, why: str) -> RankState:
        last: dict[str, list[flight_recorder.Collective]] = {}
        for one in flight_recorder.collectives():
            last.setdefault(one.group, []).append(one)
        kept = []
        for entries in last.values():
            waiting = [one for one in entries if one.pending][:_SENT]
            kept += [*[one for one in entries[-_SENT:] if one not in waiting], *waiting]
        return RankState(
            rank=self.rank,
            host=self.host,
            pid=os.getpid(),
            step=self.steps(),
            why=why,
            groups=flight_recorder.group_ranks(),
            collectives=sorted(kept, key=lambda one: one.entered),
            stack=stacks.own_stack(),
        )

    def _answer(self, state: RankState, number: int) -> None:
        self._store.set(f"{number}/{state.rank}", json.dumps(asdict(state)))
        self._store.append(f"{number}/answered", f"{state.rank},")

    def _answered(self, number: int) -> set[int]:
        text = self._store.get(f"{number}/answered").decode()
        return {int(rank) for rank in text.split(",") if rank}

    def _members(self) -> dict[int, dict[str, Any]]:
        """Return what each rank wrote about itself when it started."""
        lines = self._store.get("members").decode().splitlines()
        return {member["rank"]: member for member in map(json.loads, lines)}

    def _describe_silent_neighbours(self, number: int, answered: set[int]) -> None:
        for rank, member in sorted(self._members().items()):
            if rank in answered or member["host"] != self.host:
                continue
            if not run_folder.has_rank(self.folder, rank, member["pid"]):
                continue
            beat = run_folder.read_beat(self.folder, rank)
            if time.time() - beat.time < _RECENT:
                continue  # it still takes part in the last report, and will answer
            if self._store.add(f"{number}/asks/{rank}", 1) > 1:
                continue  # another rank on this machine does
            silent, stack = "has ended", list[str]()
            if run_folder.is_alive(self.folder, rank):  # otherwise another process may have its ID
                silent, stack = stacks.describe_silent(member["pid"], member["stacks"])
            state = RankState(
                rank=rank,
                host=self.host,
                pid=member["pid"],
                step=beat.step,
                silent=silent,
                seen=time.time() - beat.time,
                stack=stack,
            )
            self._answer(state, number)

    def _compose(self, number: int) -> str:
        until = time.monotonic() + 3.0
        answered = self._answered(number)
        while len(answered) < self.ranks and time.monotonic() < until:
            self._pause(0.1)
            answered = self._answered(number)
        keys = [f"{number}/{rank}" for rank in sorted(answered)]
        states = [RankState.from_json(json.loads(one)) for one in self._store.multi_get(keys)]
        states += self._silent_alone(answered)
        return compose({one.rank: one for one in states}, self.ranks, self.timeout)

    def _silent_alone(self, answered: set[int]) -> list[RankState]:
        """Return what is known about ranks that do not answer and are alone on their machines."""
        found = []
        for rank, member in sorted(self._members().items()):
            if rank in answered or not self._store.check([f"beat/{rank}"]):
                continue
            beat = run_folder.parse_beat(self._store.get(f"beat/{rank}").decode())
            state = RankState(
                rank=rank,
                host=member["host"],
                pid=member["pid"],
                step=beat.step,
                silent=_ALONE,
                seen=max(0.0, time.time() - beat.time),
            )
            found.append(state)
        return found

    def _keep(self, number: int) -> None:
        """Write the report to the folder, where `accelerate-core dump` finds it."""
        until = time.monotonic() + 5.0
        while not self._store.check([f"{number}/text"]) and time.monotonic() < until:
            self._pause(0.1)
        if self._store.check([f"{number}/text"]):
            draft = self.folder / f".report{number}.{self.rank}"
            text = self._store.get(f"{number}/text").decode(errors="replace")
            run_folder.write(draft, text)
            draft.replace(self.folder / f"report{number}.txt")

    def _print(self, text: str) -> None:
        sys.stderr.write(f"\n{text}")
        sys.stderr.flush()

    # --- slow ranks ---------------------------------------------------------------------------

    def _compare_speeds(self, now: float, waited: float) -> None:
        compared = self.stragglers
        assert compared is not None
        step = self.steps()
        if step and not waited:  # starting up does not belong to a step
            compared.sample(stacks.own_place())
        mine = compared.due(now, step)
        if mine is None:
            return
        self._store.set(f"speed/{self.rank}", mine)
        if self.rank == 0:
            keys = [f"speed/{rank}" for rank in range(self.ranks)]
            if self._store.check(keys):
                for line in compared.describe(self._store.multi_get(keys)):
                    self._print(line)
