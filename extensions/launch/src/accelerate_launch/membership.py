"""Which machines take part in a run, and which have joined or left since it was last restarted."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Machine:
    """A launcher or a node of Ray. Several of them on one host count as several machines.

    Attributes:
        instance: distinguishes those of one host, such as "process 71".
    """

    host: str
    instance: str


class Membership:
    """Compares the machines of each group with those of the group before.

    Attributes:
        restarted: whether a machine of the current group was in an earlier one.
    """

    def __init__(self, *, holds_store: bool) -> None:
        self.restarted = False
        self._holds_store = holds_store
        self._me = Machine(socket.gethostname(), f"process {os.getpid()}")
        self._machines: frozenset[Machine] = frozenset()

    def update(self, store: Any, rank: int, size: int) -> str | None:
        """Exchange the machines of a new group. Return what has changed, on one machine only.

        That is the machine that holds the store of the rendezvous, if it was in the group before.

        Args:
            store: the store of this group.
            rank: the number of this machine in the group.
            size: the number of machines in the group.
        """
        entry = asdict(self._me)
        entry |= {"holds_store": self._holds_store, "stayed": bool(self._machines)}
        store.set(_key(rank), json.dumps(entry))
        entries = [json.loads(store.get(_key(number))) for number in range(size)]
        before = self._machines
        self._machines = frozenset(Machine(one["host"], one["instance"]) for one in entries)
        stayed = [number for number, one in enumerate(entries) if one["stayed"]]
        self.restarted = bool(stayed)
        if not stayed or self._machines == before:
            return None
        speaker = min(stayed, key=lambda number: not entries[number]["holds_store"])
        return describe(before, self._machines) if rank == speaker else None


def describe(before: Collection[Machine], now: Collection[Machine]) -> str:
    """Return the machines that joined and left: "Machines now: 3 (was 2); joined: n3"."""
    hosts = Counter(machine.host for machine in {*before, *now})

    def names(machines: set[Machine]) -> str:
        return ", ".join(
            sorted(
                one.host if hosts[one.host] == 1 else f"{one.host} ({one.instance})"
                for one in machines
            )
        )

    joined, left = {*now} - {*before}, {*before} - {*now}
    text = f"Machines now: {len(now)} (was {len(before)})"
    text += f"; joined: {names(joined)}" if joined else ""
    return text + (f"; left: {names(left)}" if left else "")


def _key(rank: int) -> str:
    return f"accelerate/machines/{rank}"
