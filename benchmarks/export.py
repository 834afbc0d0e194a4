"""Exporting a sharded model: each rank writes its parts, compared with gathering on rank 0.

    python benchmarks/export.py [--ranks 2] [--size 512]

Each way runs in processes of its own, because memory that one way freed would hide what the next one uses.
The table shows time, and how far the largest resident memory of rank 0 rises above that before the export.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from harness import memory, torchrun
from rich.console import Console
from rich.table import Table

WAYS = {"parts": "each rank writes its parts", "gather": "rank 0 gathers and writes"}


def worker(way: str, megabytes: int, folder: Path) -> None:
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
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    accelerator.wait_for_everyone()
    before = memory("VmRSS")
    start = time.perf_counter()
    accelerator.save_model(model, folder / "weights")
    accelerator.wait_for_everyone()
    took = time.perf_counter() - start
    if accelerator.is_main_process:
        figures = {"seconds": took, "peak": memory("VmHWM") - before}
        (folder / "figures.json").write_text(json.dumps(figures))
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", type=int, default=512, help="MB of weights")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker[0], options.size, Path(options.worker[1]))
        return
    table = Table(
        "", "seconds", "memory added on rank 0", title=f"{options.size} MB, {options.ranks} ranks"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(options.rounds):
        for way, title in WAYS.items():
            with tempfile.TemporaryDirectory() as folder:
                command = [*torchrun(options.ranks), __file__, "--size", str(options.size)]
                command += ["--worker", way, folder]
                subprocess.run(command, env=environment, check=True, timeout=600)
                figures = json.loads(Path(folder, "figures.json").read_text())
            table.add_row(title, f"{figures['seconds']:.2f}", f"{figures['peak']:.0f} MB")
    Console().print(table)


if __name__ == "__main__":
    main()
