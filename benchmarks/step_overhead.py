"""What a wrapper adds to one training step of a tiny model on the CPU.

All contenders run in one process, in turn, for several rounds; the figures are medians over
the rounds, the ratio is taken within each round. Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

Step = Callable[[], None]


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any, DataLoader]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    data = TensorDataset(torch.randn(4096, 4), torch.randn(4096, 1))
    return model, optimizer, scheduler, DataLoader(data, batch_size=8)


def loop(
    model: Any, optimizer: Any, scheduler: Any, loader: Any, backward: Any, within: Any
) -> Step:
    """Return a function that runs one epoch of 512 steps."""
    loss_function = torch.nn.functional.mse_loss

    def epoch() -> None:
        for x, y in loader:
            with within(model):
                loss = loss_function(model(x), y)
                backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return epoch


class Nothing:
    def __init__(self, _: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def raw() -> Step:
    model, optimizer, scheduler, loader = parts()
    return loop(model, optimizer, scheduler, loader, lambda loss: loss.backward(), Nothing)


def ours() -> Step:
    from accelerate_core import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler, loader = accelerator.prepare(*parts())
    return loop(model, optimizer, scheduler, loader, accelerator.backward, accelerator.accumulate)


def accelerate() -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler, loader = accelerator.prepare(*parts())
    return loop(model, optimizer, scheduler, loader, accelerator.backward, accelerator.accumulate)


def fabric() -> Step:
    from lightning_fabric import Fabric

    engine = Fabric(accelerator="cpu", devices=1)
    engine.launch()
    model, optimizer, scheduler, loader = parts()
    model, optimizer = engine.setup(model, optimizer)
    loader = engine.setup_dataloaders(loader)
    return loop(model, optimizer, scheduler, loader, engine.backward, Nothing)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=15)
    rounds = arguments.parse_args().rounds
    torch.set_num_threads(1)
    contenders: dict[str, Step] = {}
    for name, make in (
        ("raw PyTorch", raw),
        ("accelerate-core", ours),
        ("Hugging Face Accelerate", accelerate),
        ("Lightning Fabric", fabric),
    ):
        try:
            contenders[name] = make()
        except ImportError:
            Console().print(f"{name} is not installed; left out")
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for epoch in contenders.values():
        epoch()  # warm-up
    for _ in range(rounds):
        for name, epoch in contenders.items():
            start = time.perf_counter()
            epoch()
            times[name].append((time.perf_counter() - start) / 512 * 1e6)
    table = Table(title=f"One training step, Linear(4, 1), batch 8, median of {rounds} rounds")
    for column in ("", "µs per step", "added µs", "ratio to raw"):
        table.add_column(column, justify="left" if not column else "right")
    base = times["raw PyTorch"]
    for name, values in times.items():
        added = statistics.median(v - b for v, b in zip(values, base, strict=True))
        ratio = statistics.median(v / b for v, b in zip(values, base, strict=True))
        table.add_row(name, f"{statistics.median(values):.0f}", f"{added:+.0f}", f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
