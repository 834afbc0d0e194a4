"""Time to print the command line's help and to import the package.

Whole processes are timed in turn for several rounds, and medians are printed. Libraries that are not
installed are left out.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import time

from rich.console import Console
from rich.table import Table

ROUNDS = 5
OURS = "from accelerate_core.cli import main; main(['launch', '--help'])"
PEER = (
    "import sys; sys.argv = ['accelerate', 'launch', '--help'];"
    "from accelerate.commands.accelerate_cli import main; main()"
)
CASES = {
    "python -c pass": ("sys", "pass"),
    "accelerate-core launch --help": ("accelerate_core", OURS),
    "accelerate launch --help": ("accelerate", PEER),
    "import torch": ("torch", "import torch"),
    "import accelerate_core": ("accelerate_core", "import accelerate_core"),
    "from accelerate_core import Accelerator": (
        "accelerate_core",
        "from accelerate_core import Accelerator",
    ),
    "from accelerate import Accelerator": ("accelerate", "from accelerate import Accelerator"),
    "from lightning_fabric import Fabric": (
        "lightning_fabric",
        "from lightning_fabric import Fabric",
    ),
}


def main() -> None:
    there = {n: code for n, (module, code) in CASES.items() if importlib.util.find_spec(module)}
    times: dict[str, list[float]] = {name: [] for name in there}
    for _ in range(ROUNDS):
        for name, code in there.items():
            start = time.perf_counter()
            subprocess.run(
                [sys.executable, "-c", code], check=True, capture_output=True, timeout=120
            )
            times[name].append(time.perf_counter() - start)
    table = Table(title=f"Whole processes, median of {ROUNDS}")
    table.add_column("")
    table.add_column("seconds", justify="right")
    for name, values in times.items():
        table.add_row(name, f"{statistics.median(values):.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
