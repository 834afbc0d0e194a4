"""Train with each mutant for a few steps, and report what the run itself says about it.

Run on two ranks: `in_a_run.py FOLDER`. Each rank reports `{mutant: [text without, text with debug mode]}`.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import of_common_mistakes  # noqa: F401  # fills the table
import torch
from registry import MUTANTS
from torch.utils.data import DataLoader, TensorDataset

from accelerate_testing import CheckContext, write_result
from accelerate_testing.training import Net, loss_of, sgd
from accelerate_testing.worker import Ranks


def train(ctx: CheckContext) -> str:
    """Train 60 steps, save, load, and return the first warning that names a fault."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator = ctx.accelerator()
        model: Any = Net(accelerator.process_index)
        optimizer: Any = sgd(model.parameters())
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 20)
        x = torch.randn(480, 6, generator=torch.Generator().manual_seed(0))
        loader: Any = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4)
        model, optimizer, scheduler, loader = accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        for batch in loader:
            accelerator.backward(loss_of(model, batch))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.gather_for_metrics(batch[0])
        _ = getattr(accelerator, "no_such_attribute", None)
        accelerator.load_state(accelerator.save_state(str(ctx.scratch("state"))))
        ctx.end()
    texts = [str(one.message) for one in caught]
    return next((text for text in texts if "backend" in text or "sound" in text), "")


def main() -> None:
    folder = Path(sys.argv[1]).parent
    found: dict[str, list[str]] = {}
    for name, (cls, _) in MUTANTS.items():
        found[name] = []
        for debug in ("0", "1"):
            os.environ["ACCELERATE_DEBUG_MODE"] = debug
            here = folder / f"{name}_{debug}"
            here.mkdir(exist_ok=True)
            ctx = CheckContext("backend", "sound", cls, here, timeout=5.0)
            ranks = Ranks(here, 10.0)
            line: dict[str, Any] = {"state": "passed"}
            try:
                text = train(ctx)
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                line["state"] = "failed"
            found[name].append(text)
            ranks.say("run", line)
            if not ranks.all_well("run"):
                ctx.abandon()
            write_result(found)


if __name__ == "__main__":
    main()
