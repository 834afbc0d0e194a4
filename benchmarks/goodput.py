"""Wall time to a fixed number of steps under a seeded schedule of kills, relative to a run without kills.

    python benchmarks/goodput.py [--processes 2] [--steps 300] [--kills 4] [--seeds 1 2]

Three ways to survive: a full restart (torchrun alone), an elastic launch that continues with the ranks that
are left, and torchft. A step sleeps, so that the CPU is not the limit. The checkpoint interval follows from
Young and Daly's formula with the measured time of a save.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WAYS = ("none", "full restart", "elastic", "torchft")


# --- the script that is trained -------------------------------------------------------------------


class Progress:
    """The step of the run."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def train(given: argparse.Namespace) -> None:
    """Train for a number of steps, and record when each one was taken."""
    import torch

    from accelerate_core import Accelerator, ProjectConfiguration, set_seed

    folder = Path(given.folder)
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(
            str(folder), automatic_checkpoint_naming=True, total_limit=2
        ),
    )
    set_seed(0)
    replica = getattr(accelerator, "replica", None)
    number = accelerator.process_index if replica is None else replica
    data = torch.utils.data.TensorDataset(torch.randn(100_000, 32))
    loader: Any = torch.utils.data.DataLoader(data, 4, shuffle=True)
    net = torch.nn.Sequential(torch.nn.Linear(32, 512), torch.nn.Tanh(), torch.nn.Linear(512, 1))
    optimizer: Any = torch.optim.AdamW(net.parameters())
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if replica is None and any((folder / "checkpoints").glob("checkpoint_*")):
        accelerator.load_state()
    record = (folder / f"record-{number}-{os.getpid()}").open("w")
    for [x] in loader:
        for index, step in enumerate(given.at):
            mark = folder / f"killed-{index}"
            if number == given.processes - 1 and progress.step >= step and not mark.exists():
                mark.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
        with accelerator.accumulate(model):
            time.sleep(given.seconds / accelerator.gradient_accumulation_steps)
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients or accelerator.optimizer_step_was_skipped:
            continue
        progress.step += 1
        print(json.dumps([progress.step, time.time()]), file=record, flush=True)
        if progress.step == given.steps:
            break
        if given.every and progress.step % given.every == 0:
            begun = time.perf_counter()
            accelerator.save_state()
            (folder / "save").write_text(str(time.perf_counter() - begun))
    accelerator.end_training()


# --- the benchmark --------------------------------------------------------------------------------


@dataclass
class Result:
    """One run: its wall time, the steps that were taken twice, and the seconds after each kill."""

    wall: float
    lost: int
    recovery: list[float]
    save: float


def command(way: str, given: argparse.Namespace, port: int, machine: int = 0) -> list[str]:
    """Return the command of one launch."""
    made = [sys.executable, "-m", "accelerate_core", "launch", "--cpu"]
    made += ["--num_processes", str(given.processes)]
    if way == "elastic":
        conf = f"last_call_timeout=1,keep_alive_interval=1,is_host={str(machine == 0).lower()}"
        made += ["--num_machines", f"1:{given.processes}"]
        made += ["--rdzv_backend", "c10d", "--main_process_ip", "127.0.0.1"]
        made += ["--main_process_port", str(port), "--rdzv_conf", conf]
        made += ["--machine_rank", str(machine)]
    elif way == "torchft":
        made += ["--backend", "torchft", "--torchft_replicas", str(given.processes)]
        made += ["--torchft_heartbeat_timeout", "1"]
    else:
        made += ["--max_restarts", "100"]
    return [*made, __file__]


def measure(way: str, given: argparse.Namespace, at: list[int], every: int) -> Result:
    """Run one way under one schedule."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
        probe.close()
        options = ["--folder", folder, "--steps", str(given.steps), "--every", str(every)]
        options += ["--processes", str(given.processes), "--seconds", str(given.seconds)]
        options += ["--at", *map(str, at)]
        # The global batch must be divisible among any number of processes that are left.
        batch = math.lcm(*range(1, given.processes + 1))
        cycle = str(batch // given.processes)
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": cycle,
        }  # fmt: skip

        def start(machine: int) -> subprocess.Popen[bytes]:
            whole = [*command(way, given, port, machine), *options]
            return subprocess.Popen(
                whole, env=environment, stderr=subprocess.DEVNULL, start_new_session=True
            )

        begun = time.time()
        machines = given.processes if way == "elastic" else 1
        running = [start(machine) for machine in range(machines)]
        done = 0
        until = time.monotonic() + given.timeout
        try:
            while running[0].poll() is None:
                assert time.monotonic() < until, f"{way} did not end within {given.timeout} s"
                time.sleep(0.1)
                killed = len(list(Path(folder).glob("killed-*")))
                if way == "elastic" and killed > done:  # the machine is lost, and comes back
                    done = killed
                    os.killpg(running[-1].pid, signal.SIGKILL)
                    time.sleep(given.away)
                    running[-1] = start(machines - 1)
            assert running[0].returncode == 0, f"{way} failed"
        finally:
            for one in running:
                if one.poll() is None:
                    os.killpg(one.pid, signal.SIGKILL)
                one.wait()
        return result(Path(folder), begun)


def result(folder: Path, begun: float) -> Result:
    """Return what the records of a run say."""
    first: dict[int, float] = {}
    taken: dict[str, list[int]] = {}
    for file in folder.glob("record-*"):
        for line in file.read_text().splitlines():
            step, at = json.loads(line)
            first[step] = min(first.get(step, math.inf), at)
            taken.setdefault(file.name.split("-")[1], []).append(step)
    kept = taken["0"]  # this rank is never killed
    recovery = []
    for mark in folder.glob("killed-*"):
        killed = float(mark.read_text())
        recovery.append(min(at for at in first.values() if at > killed) - killed)
    save = folder / "save"
    return Result(
        wall=max(first.values()) - begun,
        lost=len(kept) - len(set(kept)),
        recovery=recovery,
        save=float(save.read_text()) if save.exists() else 0.0,
    )


def main() -> None:
    """Print one row for each way and seed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--seconds", type=float, default=0.1, help="length of a step")
    parser.add_argument("--away", type=float, default=10.0, help="seconds without the lost machine")
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--folder")
    parser.add_argument("--every", type=int, default=0)
    parser.add_argument("--at", type=int, nargs="*", default=[])
    given = parser.parse_args()
    if given.folder:
        train(given)
        return
    probe = measure("none", given, [], given.steps // 4)
    base = measure("none", given, [], 0).wall
    between = given.steps * given.seconds / (given.kills + 1)
    interval = math.sqrt(2 * probe.save * between)
    every = max(1, round(interval / given.seconds))
    print(
        f"{given.processes} processes, {given.steps} steps of {given.seconds} s; without kills {base:.1f} s. "
        f"A save takes {probe.save:.3f} s and a kill comes every {between:.0f} s, so a checkpoint is written "
        f"every {every} steps."
    )
    print("| way | seed | killed at steps | wall time | relative | steps lost | recovery |")
    print("|---|---|---|---|---|---|---|")
    for seed in given.seeds:
        at = sorted(random.Random(seed).sample(range(20, given.steps - 20), given.kills))
        for way in WAYS[1:]:
            its = measure(way, given, at, 0 if way == "torchft" else every)
            seconds = ", ".join(f"{one:.1f}" for one in sorted(its.recovery))
            steps = ", ".join(map(str, at))
            print(
                f"| {way} | {seed} | {steps} | {its.wall:.1f} s | {its.wall / base:.2f} | {its.lost} | "
                f"{seconds} s |",
                flush=True,
            )


if __name__ == "__main__":
    main()
