"""Delete an Accelerator on several ranks, and keep training with the objects it prepared."""

from __future__ import annotations

import gc
import weakref

import torch
from torch.utils.data import DataLoader
from worker import PG_TIMEOUT, write_result

from accelerate_core import Accelerator, DataLoaderConfiguration


def prepared(dispatch: bool):
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT, dataloader_config=config)
    data = DataLoader(torch.arange(16.0).reshape(16, 1) / 16, 2, shuffle=True)
    return accelerator, *accelerator.prepare(model, optimizer, data)


def train(model, optimizer, loader) -> list[float]:
    for x in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [parameter.item() for parameter in model.parameters()]


weights, freed = [], []
for dispatch in (False, True):
    for keep in (True, False):
        accelerator, *parts = prepared(dispatch)
        held = [weakref.ref(one) for one in (accelerator, *parts)]
        if not keep:
            del accelerator
            gc.collect()
        weights.append(train(*parts))
        accelerator = None
        del parts
        gc.collect()
        freed.append([one() is None for one in held])
write_result({"weights": weights, "freed": freed})
