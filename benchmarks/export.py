"""Exporting a sharded model: each rank writes its parts, compared with gathering on rank 0.

    python benchmarks/export.py [--ranks 2 4] [--size 512] [--rounds 3]

Each way runs in processes of its own, because memory that one way freed would hide what the next one uses.
The table shows the median time, the processor time of all ranks in that round, and how far the largest
resident memory of rank 0 rises above that before the first export.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from harness import memory, torchrun
from rich.console import Console
from rich.table import Table

WAYS = {"parts": "each rank writes its parts", "gather": "rank 0 gathers and writes"}


def worker(way: str, megabytes: int, rounds: int, folder: Path) -> None:
    """Export a model with this many MB of weights, and write the figures of rank 0."""
    import accelerate_checkpoint.checkpointer
    from accelerate_core import Accelerator
    from accelerate_core.utils import set_seed

    torch.set_num_threads(1)
    set_seed(0)
    layers = max(megabytes // 16, 1)
    width = 2048  # 16 MB in fp32
    accelerator = Accelerator(cpu=True, backend="fsdp2")
    with torch.device("meta"):
        model = torch.nn.Sequential(
            *(torch.nn.Linear(width, width, bias=False) for _ in range(layers))
        )
    model = accelerator.prepare(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_()
    if way == "gather":
        accelerate_checkpoint.checkpointer.save_in_parallel = lambda *args: False  # type: ignore[assignment]
    found = []
    for _ in range(rounds):
        if accelerator.is_main_process:
            shutil.rmtree(folder / "weights", ignore_errors=True)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        accelerator.wait_for_everyone()
        before, cpu = memory("VmRSS"), time.process_time()
        start = time.perf_counter()
        accelerator.save_model(model, folder / "weights")
        accelerator.wait_for_everyone()
        took = time.perf_counter() - start
        peak = memory("VmHWM") - before
        total = accelerator.reduce(torch.tensor(time.process_time() - cpu), "sum")
        found.append((took, total.item(), peak))
    if accelerator.is_main_process:
        took, cpu, _ = sorted(found)[len(found) // 2]
        figures = {"seconds": took, "cpu": cpu, "peak": found[0][2]}
        (folder / "figures.json").write_text(json.dumps(figures))
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--size", type=int, default=512, help="MB of weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker[0], options.size, options.rounds, Path(options.worker[1]))
        return
    columns = ("ranks", "", "seconds", "CPU seconds of all ranks", "memory added on rank 0")
    table = Table(*columns, title=f"{options.size} MB of weights")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for ranks in options.ranks:
        for way, title in WAYS.items():
            with tempfile.TemporaryDirectory() as folder:
                command = [*torchrun(ranks), __file__, "--size", str(options.size)]
                command += ["--rounds", str(options.rounds), "--worker", way, folder]
                subprocess.run(command, env=environment, check=True, timeout=600)
                figures = json.loads(Path(folder, "figures.json").read_text())
            seconds, cpu = f"{figures['seconds']:.2f}", f"{figures['cpu']:.2f}"
            table.add_row(str(ranks), title, seconds, cpu, f"{figures['peak']:.0f} MB")
    Console().print(table)


if __name__ == "__main__":
    main()
