"""The data and the model of all scripts in this folder: scanned digits from scikit-learn."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

TRAIN = 1437


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1437 digits for training and 360 for testing, each with 64 pixels and a label."""
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:TRAIN], order[TRAIN:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network() -> nn.Sequential:
    """Return a small network with the same initial weights on every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
