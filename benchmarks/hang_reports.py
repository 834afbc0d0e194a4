"""Time per training step on two ranks, with hang reports on and off, in alternating runs.

CPU time does not depend on what else runs on the machine. The wall time does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS, STEPS, BLOCK = 5, 2000, 50

#: Name of a variant -> its environment variables.
VARIANTS = {
    "on": {},
    "off": {"ACCELERATE_DISABLED_PLUGINS": "watch"},
    "off, torch records collectives": {
        "ACCELERATE_DISABLED_PLUGINS": "watch",
        "TORCH_FR_BUFFER_SIZE": "512",
    },
}
#: Measured value per step -> its clock. The CPU time of the process includes threads of gloo and torch.
CLOCKS: dict[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    "cpu_main_thread": time.thread_time,
    "cpu_process": time.process_time,
}


def train() -> None:
    """Train on this rank, and print times and Python calls per step."""
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

    def steps(number: int) -> dict[str, float]:
        begun = {name: clock() for name, clock in CLOCKS.items()}
        for _ in range(number):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return {name: (clock() - begun[name]) / number for name, clock in CLOCKS.items()}

    steps(BLOCK)
    watching = _cpu_of_watch()
    begun = time.perf_counter()
    blocks = [steps(BLOCK) for _ in range(STEPS // BLOCK)]
    share = (_cpu_of_watch() - watching) / (time.perf_counter() - begun)
    sys.setprofile(count)
    steps(20)
    sys.setprofile(None)
    if accelerator.is_main_process:
        medians = {name: statistics.median(one[name] for one in blocks) for name in CLOCKS}
        print(json.dumps({**medians, "calls": calls // 20, "share": share}))
    accelerator.end_training()


def _cpu_of_watch() -> float:
    """Return the CPU seconds that the thread of hang reports has used."""
    for one in threading.enumerate():
        if one.name == "accelerate-watch" and one.ident is not None:
            return time.clock_gettime(time.pthread_getcpuclockid(one.ident))
    return 0.0


def measured(variant: str) -> dict[str, float]:
    """Run the training on two ranks."""
    words = ["-m", "accelerate_core", "launch", "--cpu", "--num_processes", "2", __file__, "--rank"]
    environ = {**os.environ, **VARIANTS[variant], "OMP_NUM_THREADS": "1"}
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
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for _ in range(options.rounds):
        for name, found in runs.items():
            found.append(measured(name))
    print("us per step, median of runs (lowest to highest), and relative to off:")
    base = {clock: statistics.median(one[clock] for one in runs["off"]) for clock in CLOCKS}
    for name, found in runs.items():
        print(f"hang reports {name}: {found[0]['calls']:.0f} Python calls per step")
        for clock in CLOCKS:
            times = sorted(1e6 * one[clock] for one in found)
            middle = statistics.median(times)
            ratio = middle / (1e6 * base[clock])
            print(f"  {clock}: {middle:.0f} ({times[0]:.0f} to {times[-1]:.0f}), {ratio:.3f}")
        share = statistics.median(one["share"] for one in found)
        if share:
            print(f"  the thread of hang reports used {share:.2%} of one core")
    if options.out is not None:
        options.out.write_text(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
