"""The device's memory: a batch size that fits is found, and freed memory is released."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import accelerate, batches, net, sgd, train

from accelerate_core import find_executable_batch_size

pytestmark = pytest.mark.device


def test_a_batch_size_that_fits_is_found(device: torch.device, record_property: Any) -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=4096)
    def allocate(batch_size: int) -> int:
        tried.append(batch_size)
        torch.empty(batch_size, 2**30, dtype=torch.uint8, device=device)
        return batch_size

    found = allocate()
    record_property("GiB", found)
    assert len(tried) > 1
    assert found < 4096


def test_freed_memory_is_released(device: torch.device) -> None:
    module: Any = torch.get_device_module(device)
    if not hasattr(module, "memory_reserved"):
        pytest.skip(f"torch.{device.type} cannot report its reserved memory")
    module.empty_cache()  # the memory of earlier tests
    before = module.memory_reserved()
    with accelerate(False) as accelerator:
        model = net()
        model.append(torch.nn.Linear(64, 2**20)).append(torch.nn.Linear(2**20, 64))
        model, optimizer = accelerator.prepare(model, sgd(model))
        train(accelerator, model, optimizer, batches(device, 2))
        assert module.memory_reserved() > before + 2**28
        model, optimizer = accelerator.free_memory(model, optimizer)
        # During the call, this function's own variables still held the model and the optimizer.
        assert module.memory_allocated() < before + 2**27
        accelerator.free_memory()
        assert module.memory_reserved() < before + 2**27
