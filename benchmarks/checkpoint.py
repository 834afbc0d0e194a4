"""Time of saving and loading with accelerate-core, Accelerate, and raw safetensors and torch.save.

    python benchmarks/checkpoint.py [--mb 256 2048] [--rounds 5]

Each case runs in a separate process because of its memory. The cases take turns, and medians are compared
with the raw ones. All saves sync the data to disk (fsync), and all loads read from a warm cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import OURS, PEER, RAW, Limit, Result, memory
from harness import save as write_json
from rich.console import Console
from rich.table import Table

CASES = ("raw", "ours", "ours_async", "peer")
NAMES = {"raw": RAW, "ours": OURS, "peer": PEER}
BLOCKING = "a blocking save"
NOT_INSTALLED = 77


def make(mb: int):
    """Return a model and an Adam with `mb` MB of state in total, a third of it weights."""
    import torch

    width = 1024
    layers = max(round(mb * 1e6 / 3 / (width * width * 4)), 1)
    net = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    adam = torch.optim.Adam(net.parameters(), lr=1e-3)
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    adam.step()
    adam.zero_grad()
    return net, adam


class Extra:
    """Measures the peak of additional resident memory in the block, in MB (Linux)."""

    def __enter__(self) -> Extra:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self._before = memory("VmRSS")
        return self

    def __exit__(self, *error: object) -> None:
        self.mb = max(memory("VmHWM") - self._before, 0.0)


def seconds(action: Callable[[], None], before: Callable[[], object]) -> float:
    """Return the median of three runs, each after a call of `before`."""
    times = []
    for _ in range(3):
        before()
        begun = time.perf_counter()
        action()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)


def child(case: str, mb: int, folder: Path) -> dict[str, float]:
    import torch

    torch.manual_seed(0)
    net, adam = make(mb)
    place = folder / "state"
    told: dict[str, float] = {}
    if case == "raw":
        from safetensors.torch import load_file, save_file

        def save() -> None:
            place.mkdir(exist_ok=True)
            save_file(net.state_dict(), place / "model.safetensors")
            torch.save(adam.state_dict(), place / "optimizer.bin")
            sync(place)

        def load() -> None:
            net.load_state_dict(load_file(place / "model.safetensors"))
            adam.load_state_dict(torch.load(place / "optimizer.bin", weights_only=True))
    else:
        if case == "peer":
            try:
                from accelerate import Accelerator
            except ImportError:
                raise SystemExit(NOT_INSTALLED) from None
        else:
            from accelerate_core import Accelerator
        accelerator = Accelerator(cpu=True)
        net, adam = accelerator.prepare(net, adam)

        def save() -> None:
            accelerator.save_state(str(place))
            if case == "peer":
                sync(place)

        def load() -> None:
            accelerator.load_state(str(place))

    def clear() -> None:
        shutil.rmtree(place, ignore_errors=True)

    if case == "ours_async":

        def ask() -> None:
            accelerator.save_state(str(place), blocking=False)

        def wait() -> None:
            accelerator.wait_for_checkpoint()
            clear()

        ask()  # allocates the host memory
        told["save"] = seconds(ask, wait)
        wait()
        told["written"] = seconds(lambda: (ask(), accelerator.wait_for_checkpoint()), clear)
        return told
    with Extra() as extra:
        save()
    told["save"] = seconds(save, clear)
    told["save_mb"] = extra.mb
    load()
    with Extra() as extra:
        load()
    told["load"] = seconds(load, lambda: None)
    told["load_mb"] = extra.mb
    return told


def compare(mb: int, rounds: int) -> list[Result]:
    """Run the cases in turn, and return the comparisons."""
    told: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        for case in CASES:
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, "--child", case, str(mb), folder]
                done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == NOT_INSTALLED:
                continue
            if done.returncode:
                raise SystemExit(f"{case}: {done.stderr}")
            for key, value in json.loads(done.stdout.splitlines()[-1]).items():
                scale = 1 if key.endswith("_mb") else 1e6
                told.setdefault(key, {}).setdefault(case, []).append(value * scale)
        print(f"{mb} MB: round {number + 1} of {rounds}", file=sys.stderr)
    saves, written = told["save"], told["written"]["ours_async"]
    names = {case: name for case, name in NAMES.items() if case in saves}
    return [
        Result(
            f"save, {mb} MB",
            "save",
            RAW,
            {name: saves[case] for case, name in names.items()} | {"in the background": written},
            [Limit(RAW, 1.15)],
        ),
        Result(
            f"load, {mb} MB",
            "load",
            RAW,
            {name: told["load"][case] for case, name in names.items()},
            [Limit(RAW, 1.5)],
        ),
        Result(
            f"time blocked by a background save, {mb} MB",
            "save",
            BLOCKING,
            {BLOCKING: saves["ours"], OURS: saves["ours_async"]},
            [Limit(BLOCKING, 0.2)],
        ),
        *(
            Result(
                f"extra memory of {what}, {mb} MB",
                "MB",
                RAW,
                {name: told[f"{what}_mb"][case] for case, name in names.items()},
            )
            for what in ("save", "load")
        ),
    ]


def show(results: list[Result]) -> None:
    """Print seconds and MB with their ratios to the reference, and the limits."""
    console = Console()
    table = Table("", "", "median", "ratio")
    table.columns[2].justify = table.columns[3].justify = "right"
    for result in results:
        for name in result.rounds:
            value = result.median(name)
            text = f"{value:.1f} MB" if result.unit == "MB" else f"{value / 1e6:.3f} s"
            # Ratios of small amounts of memory are meaningless.
            small = result.unit == "MB" and value < 5
            ratio = "" if small else f"{result.ratio(name, result.reference):.2f}"
            table.add_row(result.title, name, text, ratio)
        table.add_section()
    console.print(table)
    for result in results:
        for verdict in result.verdicts():
            sign = "within" if verdict["holds"] else "OVER"
            console.print(
                f"  {result.title}: {verdict['value']:.2f} {verdict['text']} "
                f"({sign} the limit of {verdict['limit']})"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default="benchmarks/results", help="folder for the JSON file")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        case, mb, folder = options.child
        print(json.dumps(child(case, int(mb), Path(folder))))
        return
    results = []
    for mb in options.mb:
        results += compare(mb, options.rounds)
    show(results)
    write_json("checkpoint", results, options.out)


if __name__ == "__main__":
    main()
