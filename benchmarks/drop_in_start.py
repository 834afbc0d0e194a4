"""Time of a Trainer run of three steps on the drop-in, compared with Accelerate.

Runs of one process are timed in turn for several rounds, and medians and ratios are printed. The script
uses the environments of `make clients` and `make clients-recorded`, and prints the time at each stage.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROUNDS = int(os.environ.get("ROUNDS", "5"))
ROOT = Path(__file__).parents[1]
PARTS = ("accelerate imported", "Trainer imported", "Trainer made", "three steps")
SCRIPT = f"""
import sys, time
def said(part): print("at", time.time(), flush=True)
import accelerate
said(0)
sys.path.insert(0, {str(ROOT / "tests" / "clients" / "cases")!r})
from tiny import Sentences, classifier
from transformers import Trainer, TrainingArguments
said(1)
given = {{"use_cpu": True, "max_steps": 3, "report_to": [], "save_strategy": "no", "disable_tqdm": True}}
args = TrainingArguments(output_dir=sys.argv[1], per_device_train_batch_size=4, **given)
made = Trainer(model=classifier(), args=args, train_dataset=Sentences(16))
said(2)
made.train()
said(3)
"""


def main() -> None:
    pythons = {
        who: ROOT / "build" / "clients" / folder / "bin" / "python"
        for who, folder in (("ours", "ours"), ("peer", "theirs"))
    }
    for python in pythons.values():
        if not python.exists():
            stamp = python.parents[1].with_suffix(".stamp").relative_to(ROOT)
            raise SystemExit(f"{python} does not exist. Run: make {stamp}")
    times: dict[str, list[list[float]]] = {who: [] for who in pythons}
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": folder}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the first round compiles to bytecode
        for _ in range(ROUNDS + 1):  # the first round fills the caches and is not counted
            for who, python in pythons.items():
                start = time.time()
                done = subprocess.run(
                    [python, "-c", SCRIPT, folder],
                    env=environ,
                    check=True,
                    capture_output=True,
                    text=True,
                    timeout=300,
                )
                lines = [line.split()[1] for line in done.stdout.splitlines() if line[:3] == "at "]
                times[who].append([float(at) - start for at in lines])
    table = Table(title=f"Seconds from the start until ..., median of {ROUNDS}")
    for column in ("until", "ours", "peer", "peer / ours"):
        table.add_column(column, justify="left" if column == "until" else "right")
    for index, part in enumerate(PARTS):
        ours, peer = (statistics.median(one[index] for one in times[who][1:]) for who in pythons)
        table.add_row(part, f"{ours:.2f}", f"{peer:.2f}", f"{peer / ours:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
