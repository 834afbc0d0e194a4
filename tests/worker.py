"""For scripts that tests run on ranks: cases that all ranks run in order, and their results."""

from __future__ import annotations

import faulthandler
import gc
import os
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accelerate_testing.processes import RESULTS_VARIABLE, write_result

__all__ = [
    "PG_TIMEOUT",
    "RANK",
    "SIZE",
    "Counter",
    "case",
    "damage",
    "flat",
    "run_cases",
    "same_on_ranks",
    "scratch",
    "write_result",
]

#: Timeout of collectives in these tests, in seconds.
PG_TIMEOUT = 60

RANK = int(os.environ.get("RANK", "0"))
SIZE = int(os.environ.get("WORLD_SIZE", "1"))

Case = Callable[[], None]
_cases: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Register a test function without arguments."""
    _cases[function.__name__] = function
    return function


def scratch(name: str) -> Path:
    """Return a folder for a case, the same on all ranks. It is deleted after the run."""
    folder = Path(os.environ[RESULTS_VARIABLE], name)
    folder.mkdir(exist_ok=True)
    return folder


def run_cases(only: list[str] | None = None) -> None:
    """Run the cases in order, and report `{case: "" or traceback}` after each.

    After a failure, the ranks only continue if all of them reached the end of the case. Otherwise
    their collectives would not match.
    """
    warnings.filterwarnings("error", message=".*deprecated.*", category=FutureWarning)
    results: dict[str, str] = {}
    ends = _store()
    for name, function in _cases.items():
        if only and name not in only:
            continue
        # If a rank hangs, it prints its stack before the collectives of other ranks time out.
        faulthandler.dump_traceback_later(PG_TIMEOUT * 0.75)
        try:
            function()
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        if results[name]:
            gc.collect()  # objects in the traceback must not survive into the next case
        write_result(results)
        ends.set(f"{name}/{RANK}", "ended")
        if results[name] and not _all_ended(ends, name):
            os._exit(1)


def _store() -> dist.Store:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, None, False, timeout=timedelta(seconds=PG_TIMEOUT))
    return dist.PrefixStore("cases", store)


def _all_ended(store: dist.Store, name: str) -> bool:
    until = time.monotonic() + 5
    keys = [f"{name}/{rank}" for rank in range(SIZE)]
    while time.monotonic() < until:
        if store.check(keys):
            return True
        time.sleep(0.1)
    return False


def flat(tensors: Any) -> torch.Tensor:
    """Return a copy of the tensors, or the parameters of a model, as one vector."""
    if isinstance(tensors, torch.nn.Module):
        tensors = tensors.parameters()
    return torch.cat([tensor.detach().reshape(-1).clone() for tensor in tensors])


def same_on_ranks(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is bitwise equal on all ranks of the default group."""
    if SIZE == 1:
        return True
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor.contiguous())
    return all(torch.equal(one, tensor) for one in every)


class Counter:
    """Counts the trained micro-batches."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


def damage(path: Path, how: str) -> None:
    """Damage a file: it is flipped (one bit), truncated, emptied or deleted."""
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "emptied":
        path.write_bytes(b"")
    else:
        path.unlink()
