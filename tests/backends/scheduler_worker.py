"""Train with a scheduler on the given backend, and report losses and learning rates for each rule."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset
from worker import PG_TIMEOUT, RANK, SIZE, write_result

from accelerate_core import Accelerator
from accelerate_core.utils import set_seed

STEPS, BATCH, GAMMA = 4, 4, 0.7


def begin() -> tuple[Any, Any, Any, Any]:
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, GAMMA)
    rows = torch.randn(STEPS * BATCH, 8), torch.randn(STEPS * BATCH, 1)
    return model, optimizer, scheduler, TensorDataset(*rows)


def plain(moves: int) -> dict[str, list[float]]:
    """Train on one process. The scheduler moves `moves` steps per optimizer step."""
    model, optimizer, scheduler, data = begin()
    losses, rates = [], []
    for x, y in DataLoader(data, BATCH):
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(moves):
            scheduler.step()
        losses.append(float(loss.detach()))
        rates.append(float(scheduler.get_last_lr()[0]))
    return {"losses": losses, "rates": rates}


def prepared(backend: str, rule: str | None) -> dict[str, Any]:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        accelerator = Accelerator(
            cpu=True, backend=backend, scheduler_steps=rule, process_group_timeout=PG_TIMEOUT
        )
        *objects, data = begin()
        model, optimizer, scheduler, loader = accelerator.prepare(
            *objects, DataLoader(data, BATCH // SIZE)
        )
        losses, rates = [], []
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
            rates.append(float(scheduler.get_last_lr()[0]))
    lines = [line for line in said.getvalue().splitlines() if "scheduler_steps" in line]
    explained = [one for one in accelerator.explain().splitlines() if "scheduler_steps" in one]
    accelerator.end_training()
    return {"losses": losses, "rates": rates, "said": lines, "explained": explained}


def plateau(backend: str) -> list[Any]:
    """Step a scheduler with a metric that only rises on one rank; return the rates and the start message."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        accelerator = Accelerator(cpu=True, backend=backend, process_group_timeout=PG_TIMEOUT)
        model, optimizer, _, data = begin()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        model, optimizer, scheduler, loader = accelerator.prepare(
            model, optimizer, scheduler, DataLoader(data, BATCH // SIZE)
        )
        for step, (x, y) in enumerate(loader):
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            scheduler.step(1.0 + (2 * step if RANK else -step))
            optimizer.zero_grad()
        rate = float(optimizer.param_groups[0]["lr"])
    accelerator.end_training()
    return [rate, [line for line in said.getvalue().splitlines() if " moves " in line]]


if __name__ == "__main__":
    torch.set_num_threads(1)
    name = sys.argv[1]
    if name == "megatron":
        sys.path.insert(0, sys.argv[2])
        import cuda_on_cpu

        cuda_on_cpu.install()
    runs = {str(rule): prepared(name, rule) for rule in (None, "per_process", "per_step")}
    write_result({**runs, "plateau": plateau(name), "plain 1": plain(1), "plain 2": plain(SIZE)})
