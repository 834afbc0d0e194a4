"""A process group of one rank with the device's backend: NCCL on CUDA."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from small import accelerate, batches, equal, net, plain, sgd, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelerate_ddp import DDPBackend


class WithGroup(DDPBackend):
    """DDP that opens its group and wraps models even with one process."""

    name = "with_group"
    needs_group = True

    def prepare_model(self, accelerator: Any, model: nn.Module, evaluation_mode: bool) -> nn.Module:
        return DistributedDataParallel(model)


def test_collectives_work_with_one_rank(
    device: torch.device, on_cpu: bool, record_property: Any
) -> None:
    with accelerate(on_cpu, backend=WithGroup) as accelerator:
        record_property("backend", dist.get_backend())
        if device.type == "cuda":  # "cpu:gloo,cuda:nccl" if the group has a backend for each device
            assert "nccl" in dist.get_backend()
        backend, tensor = accelerator.backend, torch.arange(8.0, device=device)
        assert torch.equal(backend.gather(accelerator, tensor, "world").reshape(-1), tensor)
        assert torch.equal(backend.reduce(accelerator, tensor.clone(), "sum", "world"), tensor)
        backend.broadcast(accelerator, tensor, 0, "world")
        backend.barrier(accelerator, "world")
        assert backend.gather_object(accelerator, {"rank": 0}, "world") == [{"rank": 0}]
        nested = {"a": tensor, "b": [tensor.half(), tensor.long()]}
        gathered = accelerator.gather(nested)
        assert torch.equal(gathered["b"][1], nested["b"][1])


def test_ddp_with_one_rank_trains_like_plain_torch(device: torch.device, on_cpu: bool) -> None:
    expected = net(device)
    losses = plain(expected, batches(device), clip=0.5)
    with accelerate(on_cpu, backend=WithGroup) as accelerator:
        model = net(device)
        model, optimizer = accelerator.prepare(model, sgd(model))
        assert isinstance(model, DistributedDataParallel)
        ours = train(accelerator, model, optimizer, batches(device), clip=0.5)
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(losses), rtol=1e-5, atol=1e-6)
        equal(accelerator.unwrap_model(model), expected, 1e-5)
