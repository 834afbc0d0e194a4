"""Save and load: ours, raw safetensors with torch.save, and Accelerate's. Prints ratios to raw.

    python benchmarks/checkpoint.py [--mb 256 2048] [--rounds 5]

Every case runs in a process of its own (memory), the cases take turns, and medians are compared.
All saves end with the data on the disk (fsync); all loads read from a warm cache.
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

CASES = ("raw", "ours", "ours_async", "peer")


def make(mb: int):
    """Return a model and an Adam with `mb` MB of state together (a third weights)."""
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
    """Memory beyond what was resident when the block began, at its peak, in MB (Linux)."""

    def __enter__(self) -> Extra:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *error: object) -> None:
        self.mb = max(_status("VmHWM") - self._before, 0.0)


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def seconds(action: Callable[[], None], before: Callable[[], object]) -> float:
    """Median of three."""
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
            from accelerate import Accelerator
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

        ask()  # finds the host memory
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", nargs=3)
    arguments = parser.parse_args()
    if arguments.child:
        case, mb, folder = arguments.child
        print(json.dumps(child(case, int(mb), Path(folder))))
        return
    for mb in arguments.mb:
        results: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
        for _ in range(arguments.rounds):
            for case in CASES:
                with tempfile.TemporaryDirectory() as folder:
                    command = [sys.executable, __file__, "--child", case, str(mb), folder]
                    done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    sys.stderr.write(f"{case}: {done.stderr[-500:]}\n")
                    continue
                results[case].append(json.loads(done.stdout.splitlines()[-1]))
        raw = {key: statistics.median(r[key] for r in results["raw"]) for key in results["raw"][0]}
        print(f"\n{mb} MB of state, medians of {arguments.rounds}; ratio to raw in brackets")
        for case, rows in results.items():
            if not rows:
                continue
            cells = []
            for key in rows[0]:
                value = statistics.median(row[key] for row in rows)
                against = "save" if key == "written" else key
                unit = "MB" if key.endswith("_mb") else "s"
                ratio = f" ({value / raw[against]:.2f})" if raw.get(against) else ""
                cells.append(f"{key} {value:.3g} {unit}{ratio}")
            print(f"  {case:11}", "   ".join(cells))


if __name__ == "__main__":
    main()
