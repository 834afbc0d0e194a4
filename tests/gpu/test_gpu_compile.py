"""Models compiled by inductor for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import accelerate, batches, equal, net, plain, sgd, train

from accelerate_core.utils import TorchDynamoPlugin


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_compiled_model_trains_like_an_eager_one(
    device: torch.device, on_cpu: bool, precision: str, record_property: Any
) -> None:
    import torch._dynamo.utils as dynamo

    torch._dynamo.reset()
    dynamo.counters.clear()
    expected = net(device)
    losses = plain(expected, batches(device))
    compiler = TorchDynamoPlugin(backend="inductor")
    with accelerate(on_cpu, dynamo_plugin=compiler, mixed_precision=precision) as accelerator:
        model = net()
        model, optimizer = accelerator.prepare(model, sgd(model))
        ours = train(accelerator, model, optimizer, batches(device))
    graphs = dynamo.counters["stats"]["unique_graphs"]
    record_property("graphs", graphs)
    assert graphs >= 1
    tolerance = 1e-4 if precision == "no" else 2e-2
    torch.testing.assert_close(
        torch.tensor(ours), torch.tensor(losses), rtol=tolerance, atol=tolerance
    )
    equal(model, expected, tolerance)
