"""Gather a nested structure of 15 small tensors over 2 gloo processes.

One process group serves all contenders, in turn, for several rounds; medians of milliseconds per
call on rank 0. The bare collective is one all_gather of the same number of bytes.

Run with: python -m torch.distributed.run --standalone --nproc_per_node 2 gather_nested.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

CALLS, ROUNDS = 30, 9


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    tree = {
        f"layer{i}": (torch.randn(8, 16), {"y": torch.arange(8), "m": torch.ones(8).bool()})
        for i in range(5)
    }
    size = sum(t.nbytes for pair in tree.values() for t in (pair[0], *pair[1].values()))
    flat, out = torch.zeros(size, dtype=torch.uint8), torch.zeros(2 * size, dtype=torch.uint8)
    contenders: dict[str, Callable[[], Any]] = {
        "one bare collective": lambda: dist.all_gather_into_tensor(out, flat)
    }
    from accelerate_core import Accelerator

    ours = Accelerator(cpu=True)
    contenders["accelerate-core"] = lambda: ours.gather(tree)
    try:
        from accelerate import Accelerator as Peer

        peer = Peer(cpu=True)
        contenders["Hugging Face Accelerate"] = lambda: peer.gather(tree)
    except ImportError:
        pass
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(ROUNDS + 1):
        for name, call in contenders.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            if round_:  # the first one warms up
                times[name].append((time.perf_counter() - start) / CALLS * 1e3)
    if dist.get_rank() == 0:
        table = Table(title=f"15 tensors, {size} bytes, 2 processes")
        for column in ("", "ms per call", "ratio to one collective"):
            table.add_column(column, justify="left" if not column else "right")
        base = statistics.median(times["one bare collective"])
        for name, values in times.items():
            middle = statistics.median(values)
            table.add_row(name, f"{middle:.2f}", f"{middle / base:.1f}")
        Console().print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
