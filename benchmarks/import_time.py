"""Time that `from accelerate_core import Accelerator` adds to `import torch`, compared with others.

Each import is timed in a separate process, in turn, with compiled bytecode. The results are medians of 9.
The garbage left by torch's import is collected during the next import, so the second number excludes
garbage collection.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

ROUNDS = 9
CODES = {
    "accelerate-core": "from accelerate_core import Accelerator",
    "accelerate-core, made": "from accelerate_core import Accelerator; Accelerator(cpu=True)",
    "accelerate": "from accelerate import Accelerator",
    "fabric": "from lightning_fabric import Fabric",
}
TIMED = """
import gc, time
spent, began = 0.0, 0.0
def collected(phase, info):
    global spent, began
    now = time.perf_counter()
    spent, began = (spent, now) if phase == "start" else (spent + now - began, now)
start = time.perf_counter()
import torch
torch_done = time.perf_counter()
gc.callbacks.append(collected)
{code}
whole = time.perf_counter() - torch_done
print(torch_done - start, whole, whole - spent)
"""


def seconds(code: str) -> list[float]:
    """Return the time of torch, the time that the code adds, and that without garbage collection."""
    command = [sys.executable, "-c", TIMED.format(code=code)]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    return [float(one) for one in done.stdout.split()] if done.returncode == 0 else []


def main() -> None:
    times: dict[str, list[list[float]]] = {name: [] for name in CODES}
    for code in CODES.values():
        seconds(code)
    for _ in range(ROUNDS):
        for name, code in CODES.items():
            times[name].append(seconds(code))
    for name, found in times.items():
        if not found[0]:
            print(f"{name:22} not installed")
            continue
        torch, added, own = (statistics.median(column) for column in zip(*found))
        print(f"{name:22} {added:+.2f} s on top of torch ({torch:.2f} s), {own:+.2f} s without GC")


if __name__ == "__main__":
    main()
