"""What `from accelerate_core import Accelerator` costs beside `import torch`, and the peers.

Each import is timed in a process of its own, in turn; medians of 9.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

ROUNDS = 9
CODES = {
    "torch": "import torch",
    "accelerate-core": "from accelerate_core import Accelerator",
    "accelerate-core, made": "from accelerate_core import Accelerator; Accelerator(cpu=True)",
    "accelerate": "from accelerate import Accelerator",
    "fabric": "from lightning_fabric import Fabric",
}
TIMED = "import time; began = time.perf_counter()\n{code}\nprint(time.perf_counter() - began)"


def seconds(code: str) -> float | None:
    done = subprocess.run(
        [sys.executable, "-c", TIMED.format(code=code)], capture_output=True, text=True, timeout=300
    )
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in CODES}
    for _ in range(ROUNDS):
        for name, code in CODES.items():
            one = seconds(code)
            if one is not None:
                times[name].append(one)
    torch = statistics.median(times["torch"])
    for name, found in times.items():
        if found:
            middle = statistics.median(found)
            print(f"{name:22} {middle:6.2f} s, {middle - torch:+.2f} s beside torch")
        else:
            print(f"{name:22} not installed")


if __name__ == "__main__":
    main()
