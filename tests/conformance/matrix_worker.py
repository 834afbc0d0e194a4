"""One process or rank of the matrix; a COMBINATION is `BACKEND PRECISION TRACKER,TRACKER` in one argument.

matrix_worker.py make BACKEND                      with the precisions and trackers there are
matrix_worker.py train FOLDER COMBINATION ...
matrix_worker.py read FOLDER COMBINATION ...       what the trackers wrote
"""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from worker import PG_TIMEOUT, RANK, write_result

from accelerate_core import Accelerator
from accelerate_core.contract.capabilities import lacking
from accelerate_core.errors import AccelerateError
from accelerate_core.plugins.discovery import find, installed
from accelerate_launch.explain.planned_run import planned_run
from accelerate_launch.explain.report import problem_of

TESTS = Path(__file__).parents[1]
_STAND_INS = ("deepspeed", "megatron")
sys.path[:0] = [str(TESTS / "trackers"), *(str(TESTS / "backends" / name) for name in _STAND_INS)]
import probe  # noqa: E402
import readers  # noqa: E402

STEPS = 5


def stand_in(backend: str) -> None:
    if backend == "deepspeed":
        import cpu_has_fp16  # noqa: F401
    if backend == "megatron":
        import cuda_on_cpu

        cuda_on_cpu.install()


def make(backend: str) -> list[list[Any]]:
    """Construct every combination with a backend; those that need one word with one tracker.

    Returns:
        Precision, tracker, what is lacking by what both declare, what a run says, and what `plugins`
        says before.
    """
    stand_in(backend)
    os.environ["ACCELERATE_BACKEND"] = backend
    supports = find("backend", backend, source="the matrix").load().supports
    rows: list[list[Any]] = []
    for precision in installed().of_kind("precision"):
        os.environ["ACCELERATE_MIXED_PRECISION"] = precision.name
        lacks = lacking(supports, precision.name, precision.load().needs)
        before = problem_of("precision", planned_run(dict(os.environ)))
        every = installed().of_kind("tracker")
        for tracker in every[:1] if precision.name.startswith("needs_") else every:
            said = ""
            try:
                made = Accelerator(cpu=True, log_with=tracker.name, project_dir="logs")
            except AccelerateError as error:
                said = str(error)
            else:
                names = [made.backend.name, made.mixed_precision]
                assert names == [backend, precision.name]
                made.end_training()
            rows.append([precision.name, tracker.name, lacks, said, before])
    return rows


def train(folder: Path, backend: str, precision: str, trackers: list[str]) -> list[float]:
    """Train a few steps; return the logged mean losses."""
    stand_in(backend)
    accelerator = Accelerator(
        cpu=True,
        backend=backend,
        mixed_precision=precision,
        log_with=trackers,
        project_dir="logs",
        process_group_timeout=PG_TIMEOUT,
    )
    torch.manual_seed(RANK)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.05)
    x = torch.randn(8, 6)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.init_trackers("probe", {"backend": backend}, probe.INIT_KWARGS)
    losses = []
    for step in range(STEPS):
        loss = torch.nn.functional.mse_loss(model(x).float(), x.sum(1, keepdim=True))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        accelerator.log({"loss": losses[-1]}, step=step)
    accelerator.end_training()
    return losses


def read(folder: Path, backend: str, precision: str, trackers: list[str]) -> dict[str, Any]:
    """Return step and loss as each tracker stored them."""
    found: dict[str, Any] = {}
    for name in trackers:
        if name in readers.READERS:
            found[name] = readers.READERS[name](folder)["values"]["loss"]
        else:  # that of the kit
            rows = csv.reader((folder / "logs" / "probe" / "values.csv").open(encoding="utf-8"))
            found[name] = [[int(step), float(value)] for step, key, value in rows if key == "loss"]
    return found


def each(do: Callable[..., Any], folder: Path, combinations: list[str]) -> dict[str, Any]:
    """Run an action for each combination, in separate folders."""
    done = {}
    for number, combination in enumerate(combinations):
        backend, precision, trackers = combination.split()
        here = folder / f"{number}-{backend}-{precision}"
        here.mkdir(exist_ok=True)
        os.chdir(here)
        os.environ.update(probe.environment(here))
        done[combination] = do(here, backend, precision, trackers.split(","))
        write_result(done)
    return done


if __name__ == "__main__":
    if sys.argv[1] == "make":
        write_result(make(sys.argv[2]))
    else:
        each({"train": train, "read": read}[sys.argv[1]], Path(sys.argv[2]), sys.argv[3:])
