"""Ranks of which one fails in the way that the argument names, while the others wait in a collective."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

from accelerate_core.distributed.process import acquire, release


class User:
    """Holds the runtime as an Accelerator does."""


def main(fault: str, folder: str) -> None:
    if fault == "start" and os.environ["RANK"] == "1":
        raise ValueError("at the start")
    user = User()
    runtime = acquire(user, cpu=True, timeout=timedelta(seconds=30))
    rank, attempt = runtime.process_index, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    for step in range(200):
        if rank == 1 and step == 3 and attempt == "0":
            fail(fault)
        torch.distributed.all_reduce(torch.ones(8))
        if step == 2:
            Path(folder, f"pid{rank}.{attempt}").write_text(str(os.getpid()))
        if step == 2 and fault == "hang":
            time.sleep(100)
        if step == 5:
            break
    Path(folder, f"done{rank}.{attempt}").touch()
    release(user)


def fail(fault: str) -> None:
    if fault == "raise":
        raise ValueError("in the middle")
    if fault == "exit":
        sys.exit(3)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "mismatch":
        torch.distributed.all_reduce(torch.ones(9, 9))
    if fault == "swallow":
        time.sleep(0.5)
        raise RuntimeError("Connection closed by peer: but this rank is the first to say so")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
