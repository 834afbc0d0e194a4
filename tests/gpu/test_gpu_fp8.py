"""fp8 with torchao compared with bf16, compiled and eager, emulated only on devices without fp8."""

from __future__ import annotations

import pytest
import torch
from small import accelerate, batches, net, train
from torch import nn

from accelerate_core.utils import AORecipeKwargs


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_losses_match_bf16(device: torch.device, on_cpu: bool, recipe: str, compiled: bool) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    losses = {}
    for name in ("bf16", "fp8"):
        handlers = [AORecipeKwargs(recipe=recipe)] if name == "fp8" else None
        backend = "inductor" if compiled else None
        with accelerate(
            on_cpu, mixed_precision=name, kwargs_handlers=handlers, dynamo_backend=backend
        ) as accelerator:
            model = nn.Sequential(*(net()[0] for _ in range(4)))
            before = {key: value.clone() for key, value in model.state_dict().items()}
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
            model, optimizer = accelerator.prepare(model, optimizer)
            losses[name] = train(accelerator, model, optimizer, batches(device, 20))
            after = accelerator.get_state_dict(model)
            changed = {
                key: not torch.equal(value.cpu(), before[key]) for key, value in after.items()
            }
            assert all(changed.values()), changed
            if name == "fp8":
                told = accelerator.explain()
                assert "2 of 4 linear layers" in told
                has_fp8 = device.type == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
                assert ("emulate" in told) != has_fp8
    last, other = (sum(losses[name][-5:]) for name in ("fp8", "bf16"))
    assert abs(last / other - 1) < 0.02, losses
