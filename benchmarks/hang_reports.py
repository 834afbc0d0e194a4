"""Time per training step on two ranks, with hang reports on and off, in alternating runs."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROUNDS, STEPS = 5, 400


def train() -> None:
    """Train one epoch on this rank, and print the time per step and the Python calls per step."""
    import torch

    from accelerate_core import Accelerator

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    batch = torch.ones(16, 256)
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    def steps(number: int) -> float:
        begun = time.perf_counter()
        for _ in range(number):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter() - begun) / number

    steps(50)
    times = [steps(40) for _ in range(STEPS // 40)]
    sys.setprofile(count)
    steps(20)
    sys.setprofile(None)
    if accelerator.is_main_process:
        print(json.dumps({"seconds": min(times), "calls": calls // 20}))
    accelerator.end_training()


def measured(on: bool) -> dict[str, float]:
    """Run the training on two ranks."""
    off = {} if on else {"ACCELERATE_DISABLED_PLUGINS": "watch"}
    words = ["-m", "accelerate_core", "launch", "--cpu", "--num_processes", "2", __file__, "--rank"]
    environ = {**os.environ, **off, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", action="store_true", help="train on this rank")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, help="write the results to this file")
    options = parser.parse_args()
    if options.rank:
        train()
        return
    runs: dict[str, list[dict[str, float]]] = {"on": [], "off": []}
    for _ in range(options.rounds):
        for name, found in runs.items():
            found.append(measured(name == "on"))
    for name, found in runs.items():
        times = [1e6 * one["seconds"] for one in found]
        print(
            f"hang reports {name}: {min(times):.0f} us per step (median of runs "
            f"{statistics.median(times):.0f} us), {found[0]['calls']} Python calls per step"
        )
    if options.out is not None:
        options.out.write_text(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
