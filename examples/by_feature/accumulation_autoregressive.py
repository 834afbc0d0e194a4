"""Accumulate over sequences of different lengths: every token weighs the same, on any rank.

The mean of the batches' means would weigh a token in a short batch more. `num_items` counts them
over the whole cycle and all ranks, so that the gradient is that of the mean over all tokens.

accelerate-core launch --num_processes 2 examples/by_feature/accumulation_autoregressive.py
"""

from __future__ import annotations

import this
from contextlib import redirect_stdout
from io import StringIO

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from accelerate_core import Accelerator

IGNORED = -100


def lines() -> list[torch.Tensor]:
    """Return the lines of the Zen of Python as letters' numbers."""
    with redirect_stdout(StringIO()):
        text = "".join(this.d.get(letter, letter) for letter in this.s)
    return [torch.tensor([ord(c) % 128 for c in line]) for line in text.splitlines() if line]


def padded(batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return letters and the next ones, filled up to the longest line."""
    inputs = nn.utils.rnn.pad_sequence([line[:-1] for line in batch], batch_first=True)
    pad = {"batch_first": True, "padding_value": IGNORED}
    return inputs, nn.utils.rnn.pad_sequence([line[1:] for line in batch], **pad)


def main(steps: int = 2, epochs: int = 2) -> dict[str, float]:
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(128, 32), nn.Linear(32, 128))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(lines(), batch_size=2, collate_fn=padded)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(epochs):
        for inputs, targets in loader:
            tokens = (targets != IGNORED).sum()
            with accelerator.accumulate(model, num_items=tokens):
                logits = model(inputs).flatten(0, 1)
                # The sum: it is divided by the tokens of all batches of the cycle, on all ranks.
                loss = F.cross_entropy(
                    logits, targets.flatten(), ignore_index=IGNORED, reduction="sum"
                )
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append((loss / tokens).item())
    accelerator.print(f"loss per token {losses[0]:.3f}, then {losses[-1]:.3f}")
    weights = [p.detach() for p in accelerator.unwrap_model(model).parameters()]
    moved = sum((a - b.to(a.device)).abs().sum().item() for a, b in zip(weights, before))
    accelerator.end_training()
    return {"first": losses[0], "last": losses[-1], "moved": moved}


if __name__ == "__main__":
    main()
