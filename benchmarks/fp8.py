"""fp8 with torchao compared with bf16: losses of the example GPT after 200 steps, and times per step.

    python benchmarks/fp8.py             on the CPU, emulated: only the losses are meaningful
    python benchmarks/fp8.py --gpu       on one GPU with fp8: a larger model, with and without compilation

Each row is a separate run with the same weights and batches. Limits: the mean of the last ten losses is
within 2 % of that with bf16, and every weight has changed. `tests/backends/fp8` checks the dtype of the
collective when weights are gathered in fp8.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import torchrun
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
TAIL, LIMIT = 10, 0.02

#: Title -> number of ranks, options of the run.
CPU: dict[str, tuple[int, dict[str, Any]]] = {
    "bf16": (1, {"precision": "bf16"}),
    "tensorwise": (1, {}),
    "rowwise": (1, {"recipe": "rowwise"}),
    "rowwise_with_gw_hp": (1, {"recipe": "rowwise_with_gw_hp"}),
    "tensorwise, compiled": (1, {"compile": "inductor"}),
    "tensorwise, DDP 2": (2, {"backend": "ddp"}),
    "tensorwise, FSDP2 2": (2, {"backend": "fsdp2", "gather": False}),
    "tensorwise, FSDP2 2, gathered in fp8": (2, {"backend": "fsdp2", "gather": True}),
}
GPU: dict[str, tuple[int, dict[str, Any]]] = {
    f"{title}{', compiled' if compiled else ''}": (1, {**options, "compile": compiled})
    for compiled in ("", "inductor")
    for title, options in {
        "bf16": {"precision": "bf16"},
        "tensorwise": {},
        "rowwise": {"recipe": "rowwise"},
    }.items()
}
SMALL = {"length": 64, "width": 64, "heads": 4, "layers": 2, "batch": 16}
LARGE = {"length": 1024, "width": 2048, "heads": 16, "layers": 8, "batch": 8}


def worker(options: dict[str, Any], gpu: bool, steps: int) -> None:
    """Train on this rank. The first rank prints losses and times as JSON."""
    from char_gpt import GPT, Windows, standard_library

    from accelerate_core import Accelerator
    from accelerate_core.utils import AORecipeKwargs

    recipe = {"recipe": options.get("recipe", "tensorwise")}
    if options.get("gather") is not None:
        recipe["enable_fsdp_float8_all_gather"] = options["gather"]
    fp8 = options.get("precision") is None
    accelerator = Accelerator(
        cpu=not gpu,
        mixed_precision="fp8" if fp8 else options["precision"],
        kwargs_handlers=[AORecipeKwargs(emulate=not gpu, **recipe)] if fp8 else None,
        dynamo_backend=options.get("compile") or None,
        backend=options.get("backend"),
        process_group_timeout=120,
    )
    size = LARGE if gpu else SMALL
    torch.manual_seed(0)
    windows = Windows(standard_library(4.0 if gpu else 1.0), size["length"])
    model: Any = GPT(size["length"], size["width"], size["heads"], size["layers"])
    optimizer: Any = torch.optim.AdamW(model.parameters(), 3e-4 if gpu else 3e-3, weight_decay=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    before = accelerator.get_state_dict(model)
    before = {name: value.clone() for name, value in before.items()}
    rank, ranks = accelerator.process_index, accelerator.num_processes
    losses, seconds = [], []
    for step in range(steps):
        rows = [(step * size["batch"] + row) % len(windows) for row in range(size["batch"])][
            rank::ranks
        ]
        inputs, targets = map(torch.stack, zip(*(windows[row] for row in rows), strict=True))
        inputs, targets = inputs.to(accelerator.device), targets.to(accelerator.device)
        if gpu:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        loss = F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    after = accelerator.get_state_dict(model)
    unchanged = [name for name, value in after.items() if torch.equal(value, before[name])]
    if accelerator.is_main_process:
        memory = torch.cuda.max_memory_allocated() if gpu else 0
        result = {"losses": losses, "seconds": seconds, "unchanged": unchanged, "memory": memory}
        print("RESULT" + json.dumps(result), flush=True)
    accelerator.end_training()


def run(ranks: int, options: dict[str, Any], gpu: bool, steps: int) -> dict[str, Any]:
    command = torchrun(ranks) if ranks > 1 else [sys.executable]
    command += [__file__, "--row", json.dumps(options), "--steps", str(steps)] + ["--gpu"] * gpu
    environment = os.environ if gpu else {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=560)
    if done.returncode:
        raise SystemExit(f"{options}: {done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.partition("RESULT")[2])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="one GPU with fp8 matrix products")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each row")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row is not None:
        return worker(json.loads(given.row), given.gpu, given.steps)
    rows = GPU if given.gpu else CPU
    found = {
        title: run(ranks, options, given.gpu, given.steps)
        for title, (ranks, options) in track(rows.items(), "training")
    }
    device = torch.cuda.get_device_name() if given.gpu else "the CPU, emulated"
    table = Table("run", "first loss", f"last {TAIL}", "vs. bf16", "ms per step", "times bf16", "")
    table.title = f"{device}, {given.steps} steps"
    for column in table.columns[1:6]:
        column.justify = "right"
    bf16, failed = found["bf16"], False
    for title, result in found.items():
        last, other = (statistics.mean(one["losses"][-TAIL:]) for one in (result, bf16))
        took, others = (
            statistics.median(one["seconds"][given.steps // 2 :]) for one in (result, bf16)
        )
        holds = abs(last / other - 1) <= LIMIT and not result["unchanged"]
        failed |= not holds
        table.add_row(
            title,
            f"{result['losses'][0]:.4f}",
            f"{last:.4f}",
            f"{last / other - 1:+.2%}",
            f"{took * 1000:.1f}",
            f"{took / others:.2f}",
            "holds" if holds else f"OVER {', '.join(result['unchanged'][:3])}",
        )
    Console(width=110).print(table)
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
