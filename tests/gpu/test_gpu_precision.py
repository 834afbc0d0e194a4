"""Mixed precision with a real scaler, compared with the loop in torch's documentation."""

from __future__ import annotations

import pytest
import torch
from small import accelerate, batches, equal, net, sgd, train
from torch import nn


def by_hand(device: torch.device, dtype: torch.dtype, clip: float) -> tuple[nn.Module, float]:
    """Train with only torch.amp; return the model and the final scale."""
    model = net(device)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
    for inputs, targets in batches(device):
        with torch.autocast(device.type, dtype):
            outputs = model(inputs)
        scaler.scale(nn.functional.mse_loss(outputs.float(), targets)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model, scaler.get_scale()


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_mixed_precision_matches_torch_amp(
    device: torch.device, on_cpu: bool, name: str, dtype: torch.dtype
) -> None:
    expected, scale = by_hand(device, dtype, clip=0.5)
    with accelerate(on_cpu, mixed_precision=name) as accelerator:
        model = net()
        model, optimizer = accelerator.prepare(model, sgd(model))
        seen: list[torch.dtype] = []
        model[0].register_forward_hook(lambda _, __, output: seen.append(output.dtype))
        train(accelerator, model, optimizer, batches(device), clip=0.5)
        assert set(seen) == {dtype}
        assert next(model.parameters()).device == device
        equal(model, expected, 1e-5)
        if name == "fp16":
            assert accelerator.scaler.is_enabled()
            assert accelerator.scaler.get_scale() == scale


def test_an_overflow_skips_the_step_and_halves_the_scale(
    device: torch.device, on_cpu: bool
) -> None:
    with accelerate(on_cpu, mixed_precision="fp16") as accelerator:
        model = net()
        model, optimizer = accelerator.prepare(model, sgd(model))
        data = batches(device)
        train(accelerator, model, optimizer, data[:1])
        before = {name: value.clone() for name, value in model.state_dict().items()}
        scale = accelerator.scaler.get_scale()
        inputs, targets = data[1]
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets) * 1e30)
        optimizer.step()
        assert accelerator.optimizer_step_was_skipped
        assert accelerator.scaler.get_scale() == scale / 2
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        optimizer.zero_grad()
        train(accelerator, model, optimizer, data[2:3])
        assert not accelerator.optimizer_step_was_skipped
