"""A replica that dies at given steps, and records the samples of the steps that it committed.

`--kill REPLICA:RANK:STEP[:WHEN]` is a death. WHEN is `step` or `heal`; `start`, before the first quorum of a
replica that was started again; `first`, before the first quorum of the run; or `quorum`, inside of that one.
With `--wait`, the others first continue without a dead replica, and then wait until it has started again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import mse_loss
from torchft import Manager

from accelerate_core import Accelerator, set_seed

PARSER = argparse.ArgumentParser()
PARSER.add_argument("folder", type=Path)
PARSER.add_argument("--kill", action="append", default=[])
PARSER.add_argument("--samples", type=int, default=240)
PARSER.add_argument("--epochs", type=int, default=2)
PARSER.add_argument("--pause", type=float, default=0.02)
PARSER.add_argument("--workers", type=int, default=0)
PARSER.add_argument("--wait", action="store_true")
PARSER.add_argument("--unprepared", action="store_true", help="do not prepare the loader")
PARSER.add_argument("--accumulate", type=int, default=1)
GIVEN = PARSER.parse_args()


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return GIVEN.samples

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.sin(torch.arange(4) + float(index))


class Progress:
    epoch = 0
    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        die(self.step, "heal")
        self.epoch, self.step = state["epoch"], state["step"]


def die(step: int, when: str) -> None:
    """Kill this process, once for each `--kill` that matches."""
    for index, text in enumerate(GIVEN.kill):
        replica, rank, at, *kind = text.split(":")
        wanted = (kind or ["step"])[0]
        done = GIVEN.folder / f"killed-{wanted}-{index}"
        mine = (int(replica), int(rank)) == (REPLICA, RANK) and wanted == when
        due = {
            "step": step >= int(at),
            "heal": AGAIN,
            "start": AGAIN,
            "first": not AGAIN,
            "quorum": True,
        }
        if mine and not done.exists() and due[when]:
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_first_quorum() -> None:
    """Kill this process a moment after it has asked for its first quorum, if a `--kill` says so."""
    original = Manager.start_quorum

    def start_quorum(self: Manager, *arguments: Any, **more: Any) -> None:
        Manager.start_quorum = original
        killer = threading.Timer(0.05, die, (0, "quorum"))
        killer.start()
        original(self, *arguments, **more)
        # If the quorum was faster, a step could be committed but not recorded.
        killer.join()

    Manager.start_quorum = start_quorum


REPLICA = int(os.environ["ACCELERATE_TORCHFT_REPLICA"])
RANK = int(os.environ.get("RANK", "0"))
#: Whether this replica was started before. Later, the other ranks of the same start have files, too.
AGAIN = any(GIVEN.folder.glob(f"{REPLICA}-*"))


def main() -> None:
    torch.set_num_threads(1)
    if GIVEN.wait and AGAIN:
        wait_until_others_continue()
    record_stage("begun")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=GIVEN.accumulate)
    set_seed(0)
    if any(GIVEN.folder.glob("killed-*")):
        torch.rand(7)  # the order must come from the replicas that train
    loader: Any = torch.utils.data.DataLoader(Numbers(), 2, shuffle=True, num_workers=GIVEN.workers)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.05)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    model, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    if not GIVEN.unprepared:
        loader = accelerator.prepare(loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    die(0, "start")
    die(0, "first")
    die_in_the_first_quorum()
    record = (GIVEN.folder / f"{REPLICA}-{RANK}-{os.getpid()}").open("w")
    record_stage("started")
    continued = False
    while progress.epoch < GIVEN.epochs:
        for numbers, x in loader:
            die(progress.step, "step")
            if GIVEN.wait and continued:
                wait_for_others()
            time.sleep(GIVEN.pause)
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(x), x.sum(1, keepdim=True)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            taken = not accelerator.optimizer_step_was_skipped
            progress.step += taken
            replicas = accelerator.torchft.replicas
            row = [progress.epoch, numbers.tolist(), taken, replicas, time.time()]
            print(json.dumps(row), file=record, flush=True)
            continued = continued or row[3] < STARTS
        progress.epoch += 1
    weights = [
        one.full_tensor() if hasattr(one, "full_tensor") else one for one in model.parameters()
    ]
    end = {
        "weights": torch.cat([one.detach().reshape(-1) for one in weights]).tolist(),
        "lr": scheduler.get_last_lr(),
        "counts": vars(accelerator.torchft),
        "explain": accelerator.explain().splitlines()[-1],
        "steps": progress.step,
    }
    print(json.dumps(end), file=record, flush=True)
    record_stage("ended")
    accelerator.end_training()


def wait_until_others_continue() -> None:
    """Wait, in a replica that has started again, until another one has trained without it."""
    until = time.monotonic() + 90
    while time.monotonic() < until:
        lines = [
            line
            for file in GIVEN.folder.glob("[0-9]*-*")
            if not file.name.startswith(f"{REPLICA}-")
            for line in file.read_text().splitlines()
        ]
        # The last line may be incomplete, and the end of a record is not a row.
        rows = [json.loads(line) for line in lines if line.startswith("[") and line.endswith("]")]
        others = [number for number in range(STARTS) if number != REPLICA]
        # Without the second condition, replicas that died together would wait for each other.
        if any(row[3] < STARTS for row in rows) or not any(lives("begun", one) for one in others):
            return
        time.sleep(0.05)


def wait_for_others() -> None:
    """Wait until each replica that was killed has started again."""
    until = time.monotonic() + 90
    while time.monotonic() < until:
        back = all(lives("started", number) for number in range(STARTS))
        if back or any(GIVEN.folder.glob("ended-*")):
            return
        time.sleep(0.05)


def record_stage(stage: str) -> None:
    """Record for the other replicas that this one has reached a stage."""
    if RANK == 0:
        part = GIVEN.folder / f"part-{os.getpid()}"
        part.write_text(str(os.getpid()))
        part.rename(GIVEN.folder / f"{stage}-{REPLICA}")


def lives(stage: str, replica: int) -> bool:
    """Return whether the process that last recorded this stage of a replica still runs."""
    try:
        os.kill(int((GIVEN.folder / f"{stage}-{replica}").read_text()), 0)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return True


STARTS = int(os.environ.get("TEST_REPLICAS", "2"))

if __name__ == "__main__":
    main()
