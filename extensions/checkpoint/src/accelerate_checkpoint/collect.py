"""Send values of all ranks to the ranks that need them, through the store of the process group.

A collective would give every rank the values of all ranks, so with thousands of ranks each would spend
seconds on values that only one of them needs. Here, each rank sends two messages, however many ranks there
are.
"""

from __future__ import annotations

import itertools
import json
import time
import zlib
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
#: Largest number of bytes in a message. A rank that writes 100,000 tensors needs 20 MB.
_LARGEST = 256 << 20


def collect(name: str, value: Any, wanted: Sequence[int]) -> list[Any]:
    """Return the values of the wanted ranks, in this order. All ranks must call this.

    Ranks can only be relied on to arrive if all of them took part in a collective just before.

    Args:
        name: identifies the sequence of calls that this one belongs to. Calls with one name must be in the
            same order on all ranks, and a collective must separate them.
        value: plain JSON; tuples arrive as lists.
        wanted: ranks whose values the caller needs; empty if it needs none.

    Raises:
        CheckpointError: a rank did not send its value in time, or the message is not JSON.
    """
    if dist.get_world_size() == 1:
        return [value for _ in wanted]
    store: Any = dist.PrefixStore(
        f"accelerate/collect/{name}", dist.distributed_c10d._get_default_store()
    )
    number = next(_numbers[name])
    folder = number % 2  # the previous values may still be read, older ones are overwritten
    store.set(f"{folder}/{dist.get_rank()}", as_message(value))
    if store.add(f"{number}/arrived", 1) == dist.get_world_size():
        store.set(f"{number}/complete", "")
    if not wanted:
        return []
    _wait(store, f"{number}/complete", name)
    keys = [f"{folder}/{rank}" for rank in wanted]
    messages: list[bytes] = []
    if store.has_extended_api():
        for start in range(0, len(keys), _KEYS):
            messages += store.multi_get(keys[start : start + _KEYS])
    else:
        messages = [store.get(key) for key in keys]
    return [_parse(message, name, rank) for rank, message in zip(wanted, messages, strict=True)]


def as_message(value: Any) -> bytes:
    """Return a value as the bytes that a rank sends."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)


def _parse(message: bytes, name: str, rank: int) -> Any:
    reader = zlib.decompressobj()
    try:
        text = reader.decompress(message, _LARGEST)
        if reader.unconsumed_tail:
            raise ValueError(f"it is longer than {_LARGEST} bytes")
        return json.loads(text)
    except (ValueError, RecursionError, zlib.error) as error:
        raise CheckpointError(
            f"The {name} of rank {rank} in the store of the process group cannot be read: {error}"
        ) from error


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
