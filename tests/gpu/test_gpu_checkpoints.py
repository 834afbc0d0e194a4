"""Checkpoints contain the state of the device's random numbers, so a resumed run is identical."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import accelerate, batches, equal, net, sgd, train


def test_the_devices_random_numbers_are_restored(
    device: torch.device, on_cpu: bool, tmp_path: Path
) -> None:
    with accelerate(on_cpu) as accelerator:
        torch.rand(3, device=device)
        accelerator.save_state(tmp_path / "state")
        expected = torch.rand(5, device=device)
        torch.rand(7, device=device)
        accelerator.load_state(tmp_path / "state")
        assert torch.equal(torch.rand(5, device=device), expected)


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
def test_dropout_resumes_bit_for_bit(
    device: torch.device, on_cpu: bool, tmp_path: Path, precision: str
) -> None:
    def make(accelerator: Any) -> tuple[Any, Any]:
        model = net(dropout=0.5)
        return accelerator.prepare(model, sgd(model))

    data = batches(device)
    with accelerate(on_cpu, mixed_precision=precision) as accelerator:
        model, optimizer = make(accelerator)
        train(accelerator, model, optimizer, data[:3])
        accelerator.save_state(tmp_path / "state", blocking=False)
        losses = train(accelerator, model, optimizer, data[3:])  # while the checkpoint is written
        accelerator.wait_for_checkpoint()
        expected = net()
        expected.load_state_dict(accelerator.get_state_dict(model))
    with accelerate(on_cpu, mixed_precision=precision) as accelerator:
        model, optimizer = make(accelerator)
        torch.rand(11, device=device)
        accelerator.load_state(tmp_path / "state")
        assert train(accelerator, model, optimizer, data[3:]) == losses
        equal(accelerator.unwrap_model(model), expected)
