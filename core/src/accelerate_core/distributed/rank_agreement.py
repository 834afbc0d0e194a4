"""Before anything else, the ranks compare what they are about to run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from accelerate_core.distributed.process import Runtime
from accelerate_core.errors import ConfigurationError, RuntimeConflictError


def agree(runtime: Runtime, facts: Mapping[str, Any]) -> None:
    """Compare `facts` with rank 0's through the store; every rank learns the verdict.

    Raises:
        ConfigurationError: on every rank, naming the ranks and the facts that differ.
        RuntimeConflictError: a rank did not come within the time limit of the group.
    """
    if runtime.num_processes == 1 or runtime.store is None:
        return
    runtime.handshakes += 1
    prefix = f"agree/{runtime.handshakes}"
    mine = json.dumps(dict(facts), sort_keys=True, default=str)
    store = runtime.store
    wait = runtime.timeout or timedelta(minutes=5)
    if runtime.process_index != 0:
        store.set(f"{prefix}/{runtime.process_index}", mine)
        _wait(store, [f"{prefix}/verdict"], wait, runtime)
        verdict = store.get(f"{prefix}/verdict").decode()
    else:
        others = range(1, runtime.num_processes)
        keys = [f"{prefix}/{rank}" for rank in others]
        _wait(store, keys, wait, runtime)
        theirs = {rank: json.loads(store.get(key)) for rank, key in zip(others, keys, strict=True)}
        verdict = _compare(json.loads(mine), theirs)
        store.set(f"{prefix}/verdict", verdict)
    if verdict:
        raise ConfigurationError(f"The processes are not configured alike: {verdict}")


def _wait(store: Any, keys: list[str], wait: timedelta, runtime: Runtime) -> None:
    try:
        store.wait(keys, wait)
    except Exception as error:  # stores have classes of their own for this
        missing = [key.rsplit("/", 1)[1] for key in keys if not store.check([key])]
        names = ["0"] if missing == ["verdict"] else missing
        if not names:
            raise
        raise RuntimeConflictError(
            f"Rank {runtime.process_index} constructs an Accelerator and waited "
            f"{wait.total_seconds():g} s for rank {', '.join(names)} to do so too. Every rank has "
            "to construct it: take it out of blocks that only some of them run."
        ) from error


def _compare(reference: dict[str, Any], others: Mapping[int, dict[str, Any]]) -> str:
    differences = [
        f"{key} is {reference.get(key)!r} on rank 0, {facts.get(key)!r} on rank {rank}"
        for rank, facts in others.items()
        for key in sorted({*reference, *facts})
        if reference.get(key) != facts.get(key)
    ]
    more = len(differences) - 5
    shown = "; ".join([*differences[:5], *([f"and {more} more"] if more > 0 else [])])
    return f"{shown}." if shown else ""
