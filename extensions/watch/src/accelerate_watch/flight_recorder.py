"""Read torch's flight recorder, which keeps the last collectives of this process."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from accelerate_watch.recording import SIZE_VARIABLE

#: Dumps of gloo's and other libraries' collectives, and of NCCL's.
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


@dataclass(frozen=True)
class Collective:
    """One collective that this rank has entered.

    Attributes:
        group: the name of the process group.
        description: its purpose, such as `default_pg` or `mesh_dp`; "" if unknown.
        number: counts the collectives of the group, the same on all ranks.
        operation: for example `all_reduce`.
        sizes: the shapes of the input tensors.
        dtypes: their types, as torch spells them.
        entered: when, in seconds since the epoch.
        pending: whether it has not completed.
        p2p: whether this is a send or a receive, which has no number in common with other ranks.
    """

    group: str
    description: str
    number: int
    operation: str
    sizes: list[list[int]]
    dtypes: list[str]
    entered: float
    pending: bool
    p2p: bool = False


def start_recording() -> None:
    """Let torch read the variable, so that it can be removed."""
    for dump in _dumps():
        dump()


def is_recording() -> bool:
    """Return whether this version of torch records collectives and the environment allows it."""
    return bool(_dumps()) and os.environ.get(SIZE_VARIABLE) != "0"


def _dumps() -> list[Callable[..., bytes]]:
    bindings = getattr(torch._C, "_distributed_c10d", None)
    return [getattr(bindings, name) for name in _DUMPS if hasattr(bindings, name)]


def pending_positions() -> dict[str, tuple[str, str]]:
    """Return the numbers of the last completed and the last entered collective of each group that waits.

    This is cheap: it reads two counters per process group.
    """
    waiting = {}
    for at, dump in enumerate(_dumps()):
        for group, status in json.loads(dump(False, True)).get("pg_status", {}).items():
            done, entered = status["last_completed_collective"], status["last_enqueued_collective"]
            if entered != "-1" and int(entered) > int(done):
                waiting[f"{at}/{group}"] = (done, entered)
    return waiting


def collectives() -> list[Collective]:
    """Return the recorded collectives, oldest first."""
    found = []
    for dump in _dumps():
        found += [_read(entry) for entry in json.loads(dump(True, False)).get("entries", [])]
    return found


def _read(entry: dict[str, Any]) -> Collective:
    p2p = bool(entry.get("is_p2p"))
    return Collective(
        group=str(entry["process_group"][0]),
        description=str(entry["process_group"][1]).replace("undefined", ""),
        number=int(entry["p2p_seq_id" if p2p else "collective_seq_id"]),
        operation=str(entry["profiling_name"]).rpartition(":")[2],
        sizes=entry.get("input_sizes", []),
        dtypes=entry.get("input_dtypes", []),
        entered=entry.get("time_created_ns", time.time_ns()) / 1e9,
        pending=not entry.get("retired", False),
        p2p=p2p,
    )


def group_ranks() -> dict[str, list[int]]:
    """Return the global ranks of each of this process's groups, by the group's name."""
    groups = dist.distributed_c10d._world.pg_group_ranks
    return {pg.group_name: sorted(ranks) for pg, ranks in groups.items()}
