"""Saving and loading a sharded model, compared with torch.distributed.checkpoint (DCP) alone.

    python benchmarks/sharded_save.py [--ranks 2] [--mb 512] [--rounds 3] [--processes]

Ours and DCP's take turns in one set of processes, on one model and AdamW under FSDP2. Ours includes
checksums and the manifest, and syncs the data to disk, as DCP's writer does by default.

The steps after a background save are timed until it is written, and compared with steps just before it.
"Lost" is the blocked time and the delay of all these steps. "CPU" is the processor time of rank 0 for the
save, including the blocked part, without that of the steps. Unlike times, it hardly depends on what else
the machine does. `--processes` adds DCP's background save in another process, whose CPU time is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import memory, torchrun
from rich.console import Console
from rich.table import Table

WIDTH = 1024


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of an action that starts on all ranks together, and its result."""
    dist.barrier()
    begun = time.perf_counter()
    result = action()
    return time.perf_counter() - begun, result


def extra_memory(action: Callable[[], Any]) -> float:
    """Return how far the resident memory rises during an action, in MB (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = memory("VmRSS")
    action()
    return max(memory("VmHWM") - before, 0.0)


class Run:
    """A model under FSDP2 with its optimizer, and the state as DCP takes it."""

    def __init__(self, mb: int, folder: Path) -> None:
        from accelerate_core import Accelerator

        layers = max(round(mb * 1e6 / 3 / (WIDTH * WIDTH * 4)), 2)
        self.accelerator = Accelerator(cpu=True, backend="fsdp2")
        model = torch.nn.Sequential(
            *(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        )
        adam = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.model, self.adam = self.accelerator.prepare(model, adam)
        self.folder = folder
        self.batch = torch.randn(64, WIDTH)
        self.step()

    def step(self) -> None:
        self.accelerator.backward(self.model(self.batch).square().mean())
        self.adam.step()
        self.adam.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        found = {f"model.{name}": one for name, one in self.model.state_dict().items()}
        for number, values in self.adam.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{key}": value for key, value in values.items()}
        return found

    def place(self, name: str) -> Path:
        """Return an empty place, the same on all ranks."""
        path = self.folder / name
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        return path

    def steps_until(self, done: Callable[[], bool]) -> list[float]:
        """Return the seconds of each step until all ranks are done, at least one."""
        times: list[float] = []
        while True:
            times.append(timed(self.step)[0])
            left = torch.tensor([0 if done() else 1])
            dist.all_reduce(left)
            if not left.item():
                return times


def copy_seconds(state: dict[str, torch.Tensor]) -> float:
    """Return the seconds to copy this rank's shards into memory that is already allocated."""
    shards = [getattr(one, "to_local", lambda one=one: one)().detach() for one in state.values()]
    copies = [torch.zeros_like(one) for one in shards]

    def copy() -> None:
        for one, other in zip(copies, shards, strict=True):
            one.copy_(other)

    return timed(copy)[0]


class Background(NamedTuple):
    """Seconds of a background save.

    Attributes:
        blocked: until the call returned.
        step: median of the steps while the save was written, divided by a step before it.
        lost: what training lost in all.
        cpu: processor time of this rank for the save.
    """

    blocked: float
    step: float
    lost: float
    cpu: float


def background(
    run: Run, begin: Callable[[Path], Any], done: Callable[[Any], bool], name: str
) -> Background:
    """Start a background save, and time the steps until it is written."""
    place = run.place(name)
    cpu = time.process_time()
    before = [timed(run.step)[0] for _ in range(9)]
    step_cpu = (time.process_time() - cpu) / len(before)
    step = statistics.median(before)
    cpu = time.process_time()
    blocked, handle = timed(lambda: begin(place))
    after = run.steps_until(lambda: done(handle))
    cpu = time.process_time() - cpu - step_cpu * len(after)
    lost = blocked + sum(after) - step * len(after)
    return Background(blocked, statistics.median(after) / step, lost, cpu)


def worker(mb: int, rounds: int, processes: bool, folder: Path) -> None:
    """Take turns, and write the figures of rank 0."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = Run(mb, folder)
    accelerator = run.accelerator
    group = dist.new_group(backend="gloo")
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    def ours_begin(to: Path) -> Any:
        return accelerator.save_state(str(to), blocking=False)

    def ours_done(_: Any) -> bool:
        thread = accelerator._saving.checkpointer.background._thread
        return thread is None or not thread.is_alive()

    def dcp_begin(place: Path, kind: str = "thread") -> Any:
        kinds = dcp.state_dict_saver.AsyncCheckpointerType
        return dcp.async_save(
            run.state(),
            storage_writer=dcp.FileSystemWriter(place, sync_files=True),
            process_group=group,
            async_checkpointer_type=kinds(kind),
        )

    def dcp_done(handle: Any) -> bool:
        return (getattr(handle, "upload_completion", None) or handle).done()

    for number in range(rounds + 1):
        times: dict[str, float] = {}
        place = run.place("dcp")
        times["save, DCP"], _ = timed(
            lambda place=place: dcp.save(
                run.state(), storage_writer=dcp.FileSystemWriter(place, sync_files=True)
            )
        )
        ours = run.place("ours")
        times["save, ours"], _ = timed(lambda ours=ours: accelerator.save_state(str(ours)))
        state = run.state()
        times["copy, raw"] = copy_seconds(state)
        load = lambda place=place, state=state: dcp.load(state, checkpoint_id=str(place))  # noqa: E731
        times["load, DCP"], _ = timed(load)
        restore = lambda ours=ours: accelerator.load_state(str(ours))  # noqa: E731
        times["load, ours"], _ = timed(restore)
        if number == rounds:
            times["MB of a load, DCP"] = extra_memory(load)
            times["MB of a load, ours"] = extra_memory(restore)
        del state
        ways = {"ours": (ours_begin, ours_done), "DCP": (dcp_begin, dcp_done)}
        if processes:
            ways["DCP's process"] = lambda to: dcp_begin(to, "process"), dcp_done
        for who, (begin, done) in ways.items():
            made = background(run, begin, done, "background")
            accelerator.wait_for_checkpoint()
            times |= {f"{what}, {who}": value for what, value in made._asdict().items()}
        if number:  # the first round allocates memory
            for name, value in times.items():
                note(name, value)
    if dist.get_rank() == 0:
        (folder / "figures.json").write_text(json.dumps(found))
    accelerator.end_training()


def show(found: dict[str, list[float]]) -> None:
    """Print medians and the ratios that matter."""
    middle = {name: statistics.median(values) for name, values in found.items()}
    table = Table("", "ours", "DCP", "DCP's process")
    whose = ("ours", "DCP", "DCP's process")
    for what in ("save", "load", "MB of a load", "blocked", "lost", "cpu"):
        row = [middle.get(f"{what}, {who}") for who in whose]
        table.add_row(what, *("" if value is None else f"{value:.3f}" for value in row))
    for what in ("blocked", "lost"):
        row = []
        for who in whose:
            value = middle.get(f"{what}, {who}")
            save = middle[f"save, {who.removesuffix(chr(39) + 's process')}"]
            row.append("" if value is None else f"{value / save:.2f}")
        table.add_row(f"{what} ÷ save", *row)
    copied = (middle.get(f"blocked, {who}") for who in whose)
    cells = ("" if value is None else f"{value / middle['copy, raw']:.1f}" for value in copied)
    table.add_row("blocked ÷ copying the state once", *cells)
    row = [middle.get(f"step, {who}") for who in whose]
    cells = ("" if value is None else f"{value:.2f}" for value in row)
    table.add_row("next step ÷ undisturbed step", *cells)
    for what in ("save", "load"):
        table.add_row(f"{what} ÷ DCP's", f"{middle[f'{what}, ours'] / middle[f'{what}, DCP']:.2f}")
    Console().print(table)


def main() -> None:
    """Start the ranks, and show the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mb", type=int, default=512, help="size of the state, weights a third")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.mb, options.rounds, options.processes, Path(options.worker))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *torchrun(options.ranks),
            __file__,
            "--mb",
            str(options.mb),
            "--rounds",
            str(options.rounds),
        ]
        command += ["--worker", folder, *(["--processes"] if options.processes else [])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, check=True, timeout=1200)
        show(json.loads(Path(folder, "figures.json").read_text()))


if __name__ == "__main__":
    main()
