"""Helpers for all benchmarks: time contenders in turn, and write medians and ratios.

A contender is a function that does some work and returns its number of units (steps, batches, calls).
All contenders run in one process or process group, one after the other in every round, so that noise on a
shared machine affects all of them. Ratios are computed within each round.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RAW = "raw PyTorch"
OURS = "accelerate-core"
PEER = "Hugging Face Accelerate"
FABRIC = "Lightning Fabric"
Contender = Callable[[], int]


@dataclass
class Limit:
    """A limit of our figure: at most `of` times the figure of `other`."""

    other: str
    of: float
    added: bool = False  # compare the time added to the reference instead of the whole time


@dataclass
class Result:
    """Times of one comparison, in µs per unit."""

    title: str
    unit: str
    reference: str
    rounds: dict[str, list[float]] = field(default_factory=dict)
    limits: list[Limit] = field(default_factory=list)

    def median(self, name: str) -> float:
        return statistics.median(self.rounds[name])

    def added(self, name: str) -> float:
        """Return the median over the rounds of the time added to the reference."""
        base = self.rounds[self.reference]
        return statistics.median(a - b for a, b in zip(self.rounds[name], base, strict=True))

    def ratio(self, name: str, other: str) -> float:
        """Return the median over the rounds of the ratio to another contender."""
        pairs = zip(self.rounds[name], self.rounds[other], strict=True)
        return statistics.median(a / b for a, b in pairs)

    def verdicts(self) -> list[dict[str, Any]]:
        """Return how our figure compares with each limit."""
        out = []
        for limit in self.limits:
            if limit.other not in self.rounds:
                continue
            if limit.added:
                value = self.added(OURS) / self.added(limit.other)
            else:
                value = self.ratio(OURS, limit.other)
            what = "added to" if limit.added else "of"
            out.append(
                {
                    "text": f"{what} {limit.other}"
                    if not limit.added
                    else f"what {limit.other} adds",
                    "value": value,
                    "limit": limit.of,
                    "holds": value <= limit.of,
                }
            )
        return out


def measure(
    contenders: dict[str, Contender], rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Return µs per unit of every contender, one value per round."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + warm_up):
        for name, work in contenders.items():
            gc.collect()
            gc.disable()
            start = time.perf_counter()
            units = work()
            took = time.perf_counter() - start
            gc.enable()
            if number >= warm_up:
                times[name].append(took / units * 1e6)
    return times


def show(result: Result) -> None:
    """Print one comparison with its ratios and limits."""
    table = Table(title=result.title)
    table.add_column("")
    for column in (f"µs per {result.unit}", "added", f"to {result.reference}"):
        table.add_column(column, justify="right")
    for name in result.rounds:
        table.add_row(
            name,
            f"{result.median(name):.1f}",
            f"{result.added(name):+.1f}",
            f"{result.ratio(name, result.reference):.2f}",
        )
    console = Console()
    console.print(table)
    for verdict in result.verdicts():
        sign = "within" if verdict["holds"] else "OVER"
        console.print(
            f"  ours is {verdict['value']:.3f} of {verdict['text'].removeprefix('of ')}"
            f" ({sign} the limit of {verdict['limit']})"
        )


def torchrun(ranks: int) -> list[str]:
    """Return the start of a command that runs a script on several ranks of this machine."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--local_addr", "127.0.0.1"]
    return [sys.executable, *launch, f"--nproc_per_node={ranks}"]


def memory(name: str) -> float:
    """Return a figure from /proc/self/status, such as "VmRSS" or "VmHWM", in MB (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(name)) * 1024 / 1e6


def machine() -> dict[str, Any]:
    """Return a description of this machine."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    import os

    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of the contenders that are installed."""
    from importlib import metadata

    found = {}
    for name in ("accelerate-core", "accelerate", "lightning-fabric"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return found


def save(name: str, results: list[Result], folder: str) -> None:
    """Write the figures as JSON."""
    path = Path(folder, f"{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [asdict(result) | {"verdicts": result.verdicts()} for result in results]
    path.write_text(json.dumps({"machine": machine(), "results": rows}, indent=1))


def arguments(description: str | None, rounds: int) -> argparse.Namespace:
    """Parse the options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--out", default="benchmarks/results", help="folder for the JSON file")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda for step_overhead.py")
    return parser.parse_args()


def those_installed(makers: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Create the contenders whose library is installed, and print the names of the others."""
    made = {}
    for name, make in makers.items():
        try:
            made[name] = make()
        except ImportError:
            Console().print(f"{name} is not installed, so it is left out")
    return made
