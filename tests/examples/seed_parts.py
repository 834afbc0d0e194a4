"""Names that the examples of the seed documents use, and assertions about their results."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from accelerate_core import Accelerator
from accelerate_core.utils import set_seed


class Case(NamedTuple):
    run: Callable[[Path], None]
    processes: tuple[int, ...]


CASES: dict[str, Case] = {}


def seed(name: str, *processes: int) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Register an example, with the numbers of processes to run it on (default: 1 and 2)."""

    def register(function: Callable[[Path], None]) -> Callable[[Path], None]:
        CASES[name] = Case(function, processes or (1, 2))
        return function

    return register


BATCH = 4


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.outer = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(inputs)))


def data(samples: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    targets = torch.randint(3, (samples,), generator=generator)
    return TensorDataset(torch.randn(samples, 4, generator=generator), targets)


class Inputs(Dataset[torch.Tensor]):
    """Only the inputs, for examples whose batches are one tensor."""

    def __len__(self) -> int:
        return len(data())

    def __getitem__(self, index: int) -> torch.Tensor:
        return data()[index][0]


def parts(batch_size: int = BATCH) -> tuple[Any, Any, Any, Any]:
    """Dataloader, model, optimizer and scheduler, the same in every process."""
    set_seed(3)
    model = MyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    return DataLoader(data(), batch_size), model, optimizer, scheduler


def loss_func(outputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
    return outputs.square().mean() if targets is None else F.cross_entropy(outputs, targets)


def weights(model: nn.Module) -> torch.Tensor:
    """All weights in one flat tensor, on the CPU."""
    return torch.cat([p.detach().cpu().flatten() for p in model.parameters()])


def gradients(model: nn.Module) -> torch.Tensor:
    found = [p.grad for p in model.parameters()]
    return torch.cat([g.detach().cpu().flatten() for g in found if g is not None])


def same_everywhere(accelerator: Accelerator, vector: torch.Tensor) -> bool:
    rows = accelerator.gather(vector[None].to(accelerator.device))
    return bool((rows == rows[0]).all())


def assert_trained_as_plain(
    accelerator: Accelerator,
    model: nn.Module,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    clip: Callable[[Any], Any] = lambda parameters: None,
    scheduled: bool = False,
    skip: int = 0,
    epochs: int = 1,
) -> None:
    """Assert that the weights equal those of plain PyTorch with a batch n times as large."""
    n = accelerator.num_processes
    dataloader, plain, optimizer, scheduler = parts(BATCH * n)
    for epoch in range(epochs):
        for index, (inputs, targets) in enumerate(dataloader):
            if epoch == 0 and index < skip:
                continue
            optimizer.zero_grad()
            loss_of(plain(inputs), targets).backward()
            clip(plain.parameters())
            optimizer.step()
            for _ in range(n if scheduled else 0):
                scheduler.step()
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-5, atol=1e-6)
    assert same_everywhere(accelerator, weights(model))


@contextmanager
def printed() -> Iterator[list[str]]:
    """Collect the lines that this process prints in the block."""
    lines: list[str] = []
    with redirect_stdout(io.StringIO()) as text:
        yield lines
    lines += text.getvalue().splitlines()
