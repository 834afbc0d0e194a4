"""Handwritten digits, and a small network with a convolution, layer norms and repeated blocks."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["Net", "batches", "digits", "loader", "make_net"]


def digits(count: int, start: int = 0) -> TensorDataset:
    """Return `count` digits as images [1, 8, 8] in [0, 1] and labels, in a fixed random order."""
    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    order = order[start : start + count]
    images = torch.tensor(bunch.images, dtype=torch.float32)[order, None] / 16
    return TensorDataset(images, torch.tensor(bunch.target)[order])


def loader(count: int, batch_size: int, start: int = 0, **options: object) -> DataLoader:
    return DataLoader(digits(count, start), batch_size=batch_size, **options)


def batches(count: int, batch_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(*(t.split(batch_size) for t in digits(count).tensors), strict=True))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Block(64) for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).relu().flatten(1)
        for block in self.blocks:
            x = self.dropout(block(x))
        return self.head(x)


def make_net(seed: int = 0, dropout: float = 0.0) -> Net:
    torch.manual_seed(seed)
    return Net(dropout)
