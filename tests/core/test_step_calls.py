"""The overhead of a step, measured without noise as Python calls added to a plain loop."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate_core import Accelerator

STEPS = 64
#: Python calls that a step may add. With `accumulate`, they are counted per micro-batch.
LIMITS = {"plain": 11, "accumulate": 15}


def parts(steps: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(steps * 2, 4), torch.randn(steps * 2, 1))
    return model, optimizer, DataLoader(data, batch_size=2)


def calls(function: Callable[[], None]) -> int:
    """Return how many Python functions are called while `function` runs."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    # A garbage collection would also count finalizers of objects from earlier tests.
    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def raw(model: Any, optimizer: Any, loader: Any, divisor: int) -> None:
    for index, (x, y) in enumerate(loader, 1):
        loss = torch.nn.functional.mse_loss(model(x), y)
        (loss / divisor).backward()
        if index % divisor == 0:
            optimizer.step()
            optimizer.zero_grad()


def ours(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def accumulating(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", LIMITS)
def test_step_adds_few_python_calls(kind: str) -> None:
    divisor = 4 if kind == "accumulate" else 1
    run = accumulating if kind == "accumulate" else ours
    added = []
    for steps in (STEPS, 2 * STEPS):
        mine = parts(steps)
        raw(*mine, divisor)
        plain = calls(lambda mine=mine: raw(*mine, divisor))
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=divisor)
        prepared = accelerator.prepare(*parts(steps))
        run(accelerator, *prepared)
        added.append(calls(lambda a=accelerator, p=prepared: run(a, *p)) - plain)
    # The difference removes the cost of an epoch apart from its steps.
    per_step = (added[1] - added[0]) / STEPS
    print(f"{kind}: {per_step:.2f} Python calls added per step")
    assert per_step <= LIMITS[kind]
