"""FSDP2 on one rank: training, clipping, saving and loading of sharded parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import accelerate, batches, equal, net, plain, sgd, train
from torch.distributed.tensor import DTensor

from accelerate_core.utils import FullyShardedDataParallelPlugin


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "offloaded"])
def test_losses_and_weights_match_plain_torch(
    device: torch.device, on_cpu: bool, offload: bool
) -> None:
    if offload and on_cpu:
        pytest.skip("a rehearsal has nothing to offload from")
    expected = net(device)
    losses = plain(expected, batches(device), clip=0.5)
    plugin = FullyShardedDataParallelPlugin(cpu_offload=offload)
    with accelerate(on_cpu, fsdp_plugin=plugin) as accelerator:
        model = net()
        model, optimizer = accelerator.prepare(model, sgd(model))
        assert all(isinstance(one, DTensor) for one in model.parameters())
        ours = train(accelerator, model, optimizer, batches(device), clip=0.5)
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(losses), rtol=1e-4, atol=1e-5)
        equal(model, expected, 1e-4)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_run_resumes_from_a_checkpoint(
    device: torch.device, on_cpu: bool, tmp_path: Path, precision: str, record_property: Any
) -> None:
    def run(**arguments: Any) -> list[float]:
        plugin = FullyShardedDataParallelPlugin()
        with accelerate(on_cpu, fsdp_plugin=plugin, mixed_precision=precision) as accelerator:
            model = net()
            model, optimizer = accelerator.prepare(model, sgd(model))
            data = batches(device)
            if "load" in arguments:
                accelerator.load_state(arguments["load"])
                return train(accelerator, model, optimizer, data[3:])
            losses = train(accelerator, model, optimizer, data[:3])
            accelerator.save_state(arguments["save"])
            return losses + train(accelerator, model, optimizer, data[3:])

    losses = run(save=tmp_path / "state")
    assert run(load=tmp_path / "state") == losses[3:]
    record_property("last loss", f"{losses[-1]:.4f}")
