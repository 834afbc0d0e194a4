"""Time that a step waits for `log`: ten scalars to three trackers, 10,000 times, ours and Accelerate.

    python benchmarks/tracking.py [--trackers tensorboard,wandb,dvclive] [--calls 10000]

Between two calls, the step multiplies matrices for `--step-ms` milliseconds, as in training, while the
writers work in the background. The row `nothing`, without trackers, shows how much they slow down the
loop. With `--step-ms 0`, the worst case, the loop only calls `log`. Each contender runs in a separate
process, and then the values on disk are counted. Values are Python floats, and for ours also 0-d tensors,
of which Accelerate's trackers lose some.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NOT_INSTALLED = 77
KEYS = [f"metric_{number}" for number in range(10)]
ENVIRONMENT = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "DVC_NO_ANALYTICS": "1",
    "OMP_NUM_THREADS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_OFFLINE": "1",
}
INIT_KWARGS: dict[str, dict[str, Any]] = {"dvclive": {"save_dvc_exp": False, "dvcyaml": None}}


def contend(who: str, trackers: list[str], calls: int, step_ms: float, kind: str) -> None:
    """Run one contender in this process and print its figures as JSON."""
    import torch

    torch.set_num_threads(1)
    if who == "ours":
        from accelerate_core import Accelerator
    else:
        try:
            from accelerate import Accelerator
        except ImportError:
            sys.exit(NOT_INSTALLED)
    asked = trackers if kind != "nothing" else []
    accelerator = Accelerator(cpu=True, log_with=asked, project_dir="logs")
    accelerator.init_trackers("bench", {"lr": 0.1}, INIT_KWARGS)
    size = _size_for(step_ms) if step_ms else 0
    left = torch.rand(size, size) if size else None
    waited, worked = [], 0
    begun = time.perf_counter()
    for step in range(calls):
        if left is not None:
            torch.mm(left, left)
        numbers = [step + index / 16 for index in range(len(KEYS))]
        values: dict[str, Any] = dict(zip(KEYS, numbers, strict=True))
        if kind == "tensors":
            values = {key: torch.tensor(number) for key, number in values.items()}
        busy = time.thread_time_ns()
        start = time.perf_counter()
        accelerator.log(values, step=step)
        waited.append(time.perf_counter() - start)
        worked += time.thread_time_ns() - busy
    looped = time.perf_counter() - begun
    start = time.perf_counter()
    accelerator.end_training()
    ended = time.perf_counter() - start
    waited.sort()
    figures = {
        "cpu_us": worked / calls / 1e3,
        "mean_us": statistics.fmean(waited) * 1e6,
        "median_us": waited[len(waited) // 2] * 1e6,
        "p99_us": waited[int(len(waited) * 0.99)] * 1e6,
        "max_us": waited[-1] * 1e6,
        "loop_s": looped,
        "end_s": ended,
    }
    print("FIGURES" + json.dumps(figures), flush=True)


def _size_for(step_ms: float) -> int:
    import torch

    size = 64
    while True:
        some = torch.rand(size, size)
        torch.mm(some, some)
        start = time.perf_counter()
        for _ in range(3):
            torch.mm(some, some)
        if (time.perf_counter() - start) / 3 * 1e3 >= step_ms:
            return size
        size += 32


def kept(directory: Path, tracker: str) -> int:
    """Count the steps for which a value of the first metric is on disk."""
    first = KEYS[0]
    if tracker == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(directory / "logs" / "bench"), {"scalars": 0}).Reload()
        return len({event.step for event in events.Scalars(first)})
    if tracker == "dvclive":
        text = (directory / "dvclive" / "plots" / "metrics" / f"{first}.tsv").read_text()
        return len({line.split("\t")[0] for line in text.splitlines()[1:]})
    if tracker == "wandb":
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "trackers"))
        from readers import read_wandb

        return len({step for step, _ in read_wandb(directory)["values"][first]})
    if tracker == "jsonl":
        (file,) = (directory / "logs" / "bench").glob("*/run.jsonl")
        return sum('"kind": "log"' in line for line in file.read_text().splitlines())
    raise SystemExit(f"This script cannot count the values of the tracker {tracker!r}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trackers", default="tensorboard,wandb,dvclive")
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--peer-calls", type=int, default=1_000, help="calls with Accelerate")
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--contend", nargs=2, metavar=("WHO", "KIND"))
    options = parser.parse_args()
    trackers = options.trackers.split(",")
    if options.contend:
        contend(options.contend[0], trackers, options.calls, options.step_ms, options.contend[1])
        return
    from rich.console import Console
    from rich.table import Table

    columns = ("cpu µs", "mean µs", "median µs", "p99 µs", "max µs", "loop s", "end s", "kept")
    table = Table("contender", *columns, title=f"log: ten scalars to {options.trackers}")
    table.caption = "cpu: CPU time of the calling thread per call. All other times are wall clock."
    for who, kind, calls in (
        ("ours", "nothing", options.calls),
        ("ours", "floats", options.calls),
        ("ours", "tensors", options.calls),
        ("peer", "floats", options.peer_calls),
    ):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--contend", who, kind, "--calls", str(calls)]
            command += ["--trackers", options.trackers, "--step-ms", str(options.step_ms)]
            environment = {**os.environ, **ENVIRONMENT, "WANDB_DIR": folder, "HOME": folder}
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True
            )
            if done.returncode == NOT_INSTALLED:
                print("Hugging Face Accelerate is not installed, so it is left out.")
                continue
            lines = [line for line in done.stdout.splitlines() if line.startswith("FIGURES")]
            if not lines:
                raise SystemExit(done.stdout + done.stderr)
            figures = json.loads(lines[0].removeprefix("FIGURES"))
            asked = trackers if kind != "nothing" else []
            found = {tracker: kept(Path(folder), tracker) for tracker in asked}
        lost = ", ".join(f"{name} {count}/{calls}" for name, count in found.items())
        cells = [f"{value:.1f}" for value in figures.values()]
        table.add_row(f"{who}, {kind}, {calls} calls", *cells, lost)
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    Console(width=180).print(table, f"load average: {load} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
