"""The digits of examples/quickstart.py with checkpoints, so that a killed run can resume.

    train_digits.py FOLDER [--kill | --fail] [--preempt] [--pace SECONDS]

The global batch has 64 digits on any number of ranks. `--kill` ends the last rank with SIGKILL in the
middle. `--pace` is the pause after each step, in which a test can interfere. Both have no effect after
the run has resumed. `--fail` raises an exception after three steps.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from accelerate_core import Accelerator, ProjectConfiguration, set_seed

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from quickstart import ConvNet, digits, evaluate

GLOBAL_BATCH = 64
EPOCHS = 4
SAVE_EVERY = 20
KILL_AT = 50
FAIL_AT = 3


class Progress:
    epoch = 0
    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.step = state["epoch"], state["step"]


def main(args: argparse.Namespace) -> None:
    project = ProjectConfiguration(
        str(args.folder), automatic_checkpoint_naming=True, total_limit=3
    )
    accelerator = Accelerator(
        cpu=True,
        project_config=project,
        process_group_timeout=40,
        preemption_signals="SIGTERM,SIGUSR1" if args.preempt else None,
    )
    set_seed(0)
    train_set, test_set = digits()
    batch = GLOBAL_BATCH // accelerator.num_processes
    model = ConvNet()
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        DataLoader(train_set, batch, shuffle=True),
        DataLoader(test_set, batch),
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if any((args.folder / "checkpoints").glob("checkpoint_*")):
        accelerator.load_state()
    resumed = progress.step
    last = accelerator.process_index == accelerator.num_processes - 1
    while progress.epoch < EPOCHS:
        model.train()
        for images, labels in train_loader:
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            note(args.folder, accelerator.process_index, progress.step)
            if progress.step % SAVE_EVERY == 0 and not args.preempt:
                accelerator.save_state()
            if last and args.fail and progress.step == FAIL_AT:
                raise ValueError("this rank fails on purpose")
            if last and args.kill and not resumed and progress.step == KILL_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            if not resumed:
                time.sleep(args.pace)
        progress.epoch += 1
    correct, _ = evaluate(accelerator, model, test_loader)
    if accelerator.is_main_process:
        result = {
            "correct": correct,
            "ranks": accelerator.num_processes,
            "resumed": resumed,
            "weights": fingerprint(accelerator.unwrap_model(model)),
        }
        (args.folder / "result.json").write_text(json.dumps(result))
    accelerator.end_training()


def note(folder: Path, rank: int, step: int) -> None:
    """Write down the time of a rank's first step, and how far it is."""
    first = folder / f"first.{rank}"
    if not first.exists():
        first.write_text(str(time.time()))
    progress = folder / f"step.{rank}.new"
    progress.write_text(f"{os.getpid()} {os.uname().nodename} {step}")
    progress.replace(folder / f"step.{rank}")


def fingerprint(model: torch.nn.Module) -> str:
    """Return a checksum of all weights."""
    parts = [value.detach().numpy().tobytes() for value in model.state_dict().values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--preempt", action="store_true")
    parser.add_argument("--pace", type=float, default=0.0)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    main(arguments)
