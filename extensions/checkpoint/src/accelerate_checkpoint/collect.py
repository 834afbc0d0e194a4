"""Send values of all ranks to the ranks that need them, through the store of the process group.

A collective would give every rank the values of all ranks, so with thousands of ranks each would spend
seconds on values that only one of them needs. Here, each rank sends two messages, however many ranks there
are.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from accelerate_core.plugin import CheckpointError

#: Numbers the calls with one name. They are equal on all ranks, because all ranks make the same calls.
_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)

#: Keys per request. Stores limit the size of an answer.
_KEYS = 1024
#: Seconds that a rank waits for the others, all of which have just taken part in a collective.
_WAIT = 600.0


def collect(name: str, value: bytes, wanted: Sequence[int]) -> list[bytes]:
    """Return the values of the wanted ranks, in this order. All ranks must call this.

    Ranks can only be relied on to arrive if all of them took part in a collective just before.

    Args:
        name: identifies the sequence of calls that this one belongs to. Calls with one name must be in the
            same order on all ranks, and a collective must separate them.
        wanted: ranks whose values the caller needs; empty if it needs none.

    Raises:
        CheckpointError: a rank did not send its value in time.
    """
    if dist.get_world_size() == 1:
        return [value for _ in wanted]
    store: Any = dist.PrefixStore(
        f"accelerate/collect/{name}", dist.distributed_c10d._get_default_store()
    )
    number = next(_numbers[name])
    folder = number % 2  # the previous values may still be read, older ones are overwritten
    store.set(f"{folder}/{dist.get_rank()}", value)
    if store.add(f"{number}/arrived", 1) == dist.get_world_size():
        store.set(f"{number}/complete", "")
    if not wanted:
        return []
    _wait(store, f"{number}/complete", name)
    keys = [f"{folder}/{rank}" for rank in wanted]
    if not store.has_extended_api():
        return [store.get(key) for key in keys]
    found: list[bytes] = []
    for start in range(0, len(keys), _KEYS):
        found += store.multi_get(keys[start : start + _KEYS])
    return found


def _wait(store: Any, key: str, name: str) -> None:
    # Poll, because waiting in the store would block the other threads that use it.
    until, pause = time.monotonic() + _WAIT, 0.0005
    while not store.check([key]):
        if time.monotonic() >= until:
            raise CheckpointError(
                f"Rank {dist.get_rank()} waited {_WAIT:.0f} s for the {name} of the other ranks. One of them "
                "has ended or hangs."
            )
        time.sleep(pause)
        pause = min(pause * 1.2, 0.05)
