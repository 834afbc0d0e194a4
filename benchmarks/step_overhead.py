"""Time that each library adds to a training step of a tiny model, with and without accumulation."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import (
    FABRIC,
    OURS,
    PEER,
    RAW,
    Contender,
    Limit,
    Result,
    arguments,
    measure,
    save,
    show,
    those_installed,
)
from torch.utils.data import DataLoader, TensorDataset

STEPS, BATCH = 512, 8


def parts(device: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any, DataLoader]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    data = TensorDataset(torch.randn(STEPS * BATCH, 4), torch.randn(STEPS * BATCH, 1))
    return model, optimizer, scheduler, DataLoader(data, batch_size=BATCH)


def loop(model: Any, optimizer: Any, scheduler: Any, loader: Any, backward: Any) -> Contender:
    """Return a function that runs one epoch of 512 steps."""
    loss_function = torch.nn.functional.mse_loss

    def epoch() -> int:
        for x, y in loader:
            loss = loss_function(model(x), y)
            backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return STEPS

    return epoch


def accumulating(
    accelerator: Any, model: Any, optimizer: Any, scheduler: Any, loader: Any
) -> Contender:
    """Return the same loop with `accumulate`, with 4 micro-batches per optimizer step."""
    loss_function = torch.nn.functional.mse_loss

    def epoch() -> int:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = loss_function(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return STEPS

    return epoch


def synchronized(epoch: Contender, device: str) -> Contender:
    """Return the same function, which also waits for the device."""

    def waiting() -> int:
        steps = epoch()
        if device != "cpu":
            torch.get_device_module(device).synchronize()
        return steps

    return waiting


def raw(device: str) -> Contender:
    model, optimizer, scheduler, loader = parts(device)
    inner = loop(model, optimizer, scheduler, loader, lambda loss: loss.backward())
    if device == "cpu":
        return inner
    loss_function = torch.nn.functional.mse_loss

    def epoch() -> int:
        for x, y in loader:
            loss = loss_function(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return STEPS

    return epoch


def raw_accumulating(device: str) -> Contender:
    """Return a loop that accumulates by hand: it divides the loss, and steps every fourth time."""
    model, optimizer, scheduler, loader = parts(device)
    loss_function = torch.nn.functional.mse_loss

    def epoch() -> int:
        for index, (x, y) in enumerate(loader, 1):
            loss = loss_function(model(x.to(device)), y.to(device)) / 4
            loss.backward()
            if index % 4 == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return STEPS

    return epoch


def wrapped(make: Callable[..., Any], device: str, accumulate: bool) -> Contender:
    accelerator = make(cpu=device == "cpu", gradient_accumulation_steps=4 if accumulate else 1)
    prepared = accelerator.prepare(*parts(device))
    if accumulate:
        return accumulating(accelerator, *prepared)
    return loop(*prepared, accelerator.backward)


def ours(device: str, accumulate: bool) -> Contender:
    from accelerate_core import Accelerator

    return wrapped(Accelerator, device, accumulate)


def peer(device: str, accumulate: bool) -> Contender:
    from accelerate import Accelerator
    from accelerate.state import GradientState

    GradientState._reset_state()  # shared by the whole process, so old settings would remain
    return wrapped(Accelerator, device, accumulate)


def fabric(device: str) -> Contender:
    from lightning_fabric import Fabric

    engine = Fabric(accelerator="cpu" if device == "cpu" else "cuda", devices=1)
    engine.launch()
    model, optimizer, scheduler, loader = parts(device)
    model, optimizer = engine.setup(model, optimizer)
    return loop(model, optimizer, scheduler, engine.setup_dataloaders(loader), engine.backward)


def calls_added(contenders: dict[str, Contender]) -> dict[str, float]:
    """Return how many Python calls each contender adds to the raw loop per step.

    A few of them are made once per epoch.
    """

    def calls(epoch: Contender) -> float:
        count = 0

        def note(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event == "call"

        epoch()
        gc.collect()
        gc.disable()  # a collection would run finalizers of earlier contenders
        sys.setprofile(note)
        try:
            steps = epoch()
        finally:
            sys.setprofile(None)
            gc.enable()
        return count / steps

    counts = {name: calls(epoch) for name, epoch in contenders.items()}
    base = counts.pop(RAW)
    return {name: count - base for name, count in counts.items()}


def main() -> None:
    options = arguments(__doc__, rounds=15)
    torch.set_num_threads(1)
    device = options.device
    plain = {RAW: raw, OURS: partial(ours, accumulate=False), PEER: partial(peer, accumulate=False)}
    results = []
    for title, makers in (
        ("One training step", {**plain, FABRIC: fabric}),
        (
            "One micro-batch with accumulate, 4 per optimizer step",
            {
                RAW: raw_accumulating,
                OURS: partial(ours, accumulate=True),
                PEER: partial(peer, accumulate=True),
            },
        ),
    ):
        contenders = those_installed({name: partial(make, device) for name, make in makers.items()})
        contenders = {name: synchronized(epoch, device) for name, epoch in contenders.items()}
        result = Result(
            f"{title}: Linear(4, 1), batch {BATCH}, AdamW, {device}", "step", RAW,
            measure(contenders, options.rounds),
            [Limit(PEER, 0.25, added=True), Limit(FABRIC, 0.5, added=True)],
        )  # fmt: skip
        show(result)
        for name, added in calls_added(contenders).items():
            print(f"{name} adds {added:,.0f} Python calls per step")
        results.append(result)
    save("step_overhead", results, options.out)


if __name__ == "__main__":
    main()
