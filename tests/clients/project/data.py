"""Loaders for training and evaluation with handwritten digits."""

import torch
from accelerate.utils import set_seed
from sklearn.datasets import load_digits


def loaders(batch_size, seed):
    set_seed(seed)
    digits = load_digits()
    images = torch.tensor(digits.images[:250], dtype=torch.float32).flatten(1) / 16
    rows = torch.utils.data.TensorDataset(images, torch.tensor(digits.target[:250]))
    train, held_out = torch.utils.data.random_split(rows, [199, 51])
    return (
        torch.utils.data.DataLoader(train, batch_size=batch_size, shuffle=True),
        torch.utils.data.DataLoader(held_out, batch_size=2 * batch_size),
    )
