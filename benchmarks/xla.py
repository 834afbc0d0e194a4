"""XLA compared with torch on the CPU: losses and norms, bytes per device, and the time of a step.

    build/xla/bin/python benchmarks/xla.py

`make test-xla` creates this environment. Each setup takes eight steps of two micro-batches with clipping
and AdamW, on one device or on a mesh of four. Times are medians of the steps of one process, after the
graphs were compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WORKER = Path(__file__).parents[1] / "tests" / "backends" / "xla" / "xla_worker.py"
CASES = ("parity", "parity_of_meshes", "sharded", "step_time")


def run(setup: str, folder: str, devices: int | None) -> dict[str, Any]:
    """Run the cases of a setup and return their results."""
    hidden = ("ACCELERATE_", "PJRT_", "XLA_")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    environ |= {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if devices:
        environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}
    command = [sys.executable, str(WORKER), setup, folder, *CASES]
    subprocess.run(command, env=environ, check=True, timeout=600)
    found: dict[str, Any] = json.loads((Path(folder) / f"{setup}_0.json").read_text())
    return found


def main() -> None:
    """Print the tables."""
    with tempfile.TemporaryDirectory() as folder:
        devices = {"cpu": None, "one": 1, "mesh": 4, "bench": 1}
        cpu, one, mesh, bench = (run(setup, folder, count) for setup, count in devices.items())
    rows = [
        ("one device", "no", one["parity"]["no"]),
        ("one device", "bf16", one["parity"]["bf16"]),
    ]
    for name, losses in mesh["parity_of_meshes"].items():
        precision = "bf16" if name == "bf16" else "no"
        rows.append(("fsdp" if name == "bf16" else name, precision, losses))
    print(f"{'setup':12} {'precision':10} largest difference of a loss or a norm")
    for name, precision, losses in rows:
        theirs = cpu["parity"][precision]
        worst = max(abs(a - b) for a, b in zip(losses, theirs, strict=True))
        print(f"{name:12} {precision:10} {worst:.1e}")
    print(f"\n{'mesh':12} {'weights':>8} {'optimizer':>10}  bytes per device")
    for name, held in mesh["sharded"].items():
        print(f"{name:12} {held['weights']:8} {held['optimizer']:10}")
    ours, bare = bench["step_time"]
    print(
        f"\nstep: {ours * 1e3:.2f} ms with the Accelerator, {bare * 1e3:.2f} ms without it, "
        f"ratio {ours / bare:.2f}"
    )


if __name__ == "__main__":
    main()
