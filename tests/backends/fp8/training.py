"""Trains the character GPT of the examples with different Accelerators on the same batches."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from worker import PG_TIMEOUT, RANK, SIZE

from accelerate_core import Accelerator
from accelerate_core.utils import AORecipeKwargs

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from char_gpt import GPT, Windows, standard_library

LENGTH, BATCH = 32, 8
_TEXT: list[torch.Tensor] = []


def model_of(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(length=LENGTH, width=64, heads=4, layers=2)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's slice of the batch of a step."""
    if not _TEXT:
        _TEXT.append(standard_library(0.2))
    windows = Windows(_TEXT[0], LENGTH)
    pairs = [windows[(step * BATCH + row) % len(windows)] for row in range(BATCH)]
    inputs, targets = map(torch.stack, zip(*pairs, strict=True))
    return inputs.chunk(SIZE)[RANK], targets.chunk(SIZE)[RANK]


def fp8(**recipe: Any) -> dict[str, Any]:
    """Return arguments of an Accelerator."""
    return {"mixed_precision": "fp8", "kwargs_handlers": [AORecipeKwargs(emulate=True, **recipe)]}


class Run:
    """An Accelerator with a prepared model and optimizer."""

    def __init__(self, model: Any = None, **options: Any) -> None:
        self.accelerator = Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT, **options)
        self.model: Any = model_of() if model is None else model
        optimizer = torch.optim.AdamW(self.model.parameters(), 3e-3, weight_decay=0.1)
        self.model, self.optimizer = self.accelerator.prepare(self.model, optimizer)

    def train(self, first: int, last: int) -> list[float]:
        """Return the loss of each step, averaged over all ranks."""
        losses = []
        for step in range(first, last):
            inputs, targets = batch(step)
            loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(float(self.accelerator.reduce(loss.detach(), "mean")))
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of the whole state dict, on every rank."""
        state = self.accelerator.get_state_dict(self.model)
        sent = self.accelerator.communicator.broadcast_object(state)
        return {name: value.clone() for name, value in sent.items()}

    def end(self) -> None:
        self.accelerator.free_memory()
