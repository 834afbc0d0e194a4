"""Time from a launch to the first line of the script, compared with python, torchrun and Accelerate.

Whole processes on the CPU are timed in turn for several rounds. Medians are printed, and ratios to
Accelerate. The script prints the time in its first line. With two processes, the later one counts.
Accelerate is left out if it is not installed, and has no row for two processes, because it silently starts
only one with `--cpu --num_processes 2`. `PEER=/path/to/bin/accelerate` uses another environment.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROUNDS = int(os.environ.get("ROUNDS", "7"))
SCRIPT = "import os, time\nos.write(1, f'{time.time()}\\n'.encode())\n"
OURS = [sys.executable, "-m", "accelerate_core.cli", "launch", "--cpu"]


def main() -> None:
    peer = os.environ.get("PEER") or shutil.which("accelerate")
    with tempfile.TemporaryDirectory() as folder:
        script = str(Path(folder) / "first_line.py")
        Path(script).write_text(SCRIPT, encoding="utf-8")
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--local_addr", "127.0.0.1"]
        two = ["--num_processes", "2"]
        cases = {
            "help": {
                "ours": [*OURS[:-1], "--help"],
                "peer": [peer, "launch", "--help"],
            },
            "one process": {
                "python": [sys.executable, script],
                "ours": [*OURS, script],
                "peer": [peer, "launch", "--cpu", "--num_processes", "1", script],
            },
            "two processes": {
                "torchrun": [sys.executable, *torchrun, "--nproc_per_node", "2", script],
                "ours": [*OURS, *two, script],
            },
        }
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": folder}
        table = Table(title=f"Seconds to the first line (help: to the end), median of {ROUNDS}")
        for column in ("", "who", "seconds", "over plain", "peer / ours"):
            table.add_column(column, justify="left" if column in ("", "who") else "right")
        for name, ways in cases.items():
            ways = {who: command for who, command in ways.items() if command[0]}
            times: dict[str, list[float]] = {who: [] for who in ways}
            for _ in range(ROUNDS + 1):  # the first round fills the caches and is not counted
                for who, command in ways.items():
                    times[who].append(seconds([str(part) for part in command], environ))
            middle = {who: statistics.median(some[1:]) for who, some in times.items()}
            plain = middle.get("python", middle.get("torchrun"))
            for who, value in middle.items():
                over = "" if plain is None else f"{value - plain:+.2f}"
                ratio = (
                    f"{middle['peer'] / value:.1f}" if who == "ours" and "peer" in middle else ""
                )
                table.add_row(name, who, f"{value:.2f}", over, ratio)
    Console().print(table)


def seconds(command: list[str], environ: dict[str, str]) -> float:
    start = time.time()
    done = subprocess.run(
        command, env=environ, check=True, capture_output=True, text=True, timeout=120
    )
    if "--help" in command:
        return time.time() - start
    printed = [float(line) for line in done.stdout.split() if line.replace(".", "").isdigit()]
    return max(printed) - start


if __name__ == "__main__":
    main()
