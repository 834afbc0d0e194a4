"""Accumulate over sequences of different lengths, with the same weight for every token.

Averaging the mean losses of the batches would give tokens in short batches more weight. `num_items`
counts the tokens of the whole cycle on all ranks, so that the loss is the mean over all of them.

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
    """Return the lines of the Zen of Python, as character codes."""
    with redirect_stdout(StringIO()):
        text = "".join(this.d.get(letter, letter) for letter in this.s)
    return [torch.tensor([ord(c) % 128 for c in line]) for line in text.splitlines() if line]


def padded(batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return characters and the next characters, padded to the longest line."""
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
                # The sum, because backward divides it by the tokens of the cycle on all ranks.
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
