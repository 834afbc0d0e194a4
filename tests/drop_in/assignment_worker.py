"""Assignments to attributes after the Accelerator was created, on two ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from worker import PG_TIMEOUT, RANK, case, run_cases

from accelerate_core import DataLoaderConfiguration, PartialState
from accelerate_core.errors import DistributedOperationException
from accelerate_core.utils import DistributedDataParallelKwargs
from accelerate_drop_in.accelerator import Accelerator

KEPT = Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT)


class Branches(nn.Module):
    """Uses one of its two layers, so DDP has to find the unused parameters of the other one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.other = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.used(rows)


def trained(accelerator: Accelerator, steps: int = 3) -> torch.Tensor:
    model = Branches()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    generator = torch.Generator().manual_seed(RANK)
    for _ in range(steps):
        loss = model(torch.randn(8, 4, generator=generator)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return model.module.used.weight.detach().clone()


@case
def assigned_ddp_handler_is_used_to_wrap_models() -> None:
    assigned = Accelerator(cpu=True)
    assert assigned.ddp_handler is None
    with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
        trained(assigned)
    assigned.free_memory()
    handler = DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=7)
    assigned.ddp_handler = handler
    assert assigned.ddp_handler is handler
    weights = trained(assigned)
    (model,) = assigned.models
    assert model.find_unused_parameters
    assert model.bucket_bytes_cap == 7 * 2**20
    same = DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=7)
    passed = Accelerator(cpu=True, kwargs_handlers=[same])
    assert torch.equal(weights, trained(passed))
    assert "find_unused_parameters = True  (accelerator.ddp_handler)" in assigned.explain()


@case
def changes_to_a_handler_before_prepare_take_effect() -> None:
    handler = DistributedDataParallelKwargs()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    assert accelerator.ddp_handler is handler
    handler.find_unused_parameters = True
    trained(accelerator)
    accelerator.ddp_handler = None
    assert accelerator.ddp_handler is None
    with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
        trained(accelerator)


@case
def unset_fields_of_an_assigned_handler_come_from_the_environment() -> None:
    os.environ["ACCELERATE_DDP_BROADCAST_BUFFERS"] = "false"
    try:
        accelerator = Accelerator(cpu=True)
        accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
        trained(accelerator)
    finally:
        del os.environ["ACCELERATE_DDP_BROADCAST_BUFFERS"]
    (model,) = accelerator.models
    assert model.find_unused_parameters
    assert not model.broadcast_buffers


def batches(accelerator: Accelerator, rows: int = 5, **options: Any) -> list[list[float]]:
    loader = DataLoader(TensorDataset(torch.arange(float(rows))), options.pop("batch_size", 2))
    return [batch.tolist() for (batch,) in accelerator.prepare(loader)]


@case
def prepared_loader_keeps_its_setting_of_even_batches() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.even_batches = False
    uneven = accelerator.prepare(DataLoader(TensorDataset(torch.arange(5.0)), 2))
    accelerator.even_batches = True
    even = accelerator.prepare(DataLoader(TensorDataset(torch.arange(5.0)), 2))
    assert [batch.tolist() for (batch,) in uneven] == ([[0, 1], [4]], [[2, 3]])[RANK]
    assert [batch.tolist() for (batch,) in even] == ([[0, 1], [4, 0]], [[2, 3], [1, 2]])[RANK]


@case
def loaders_use_the_configuration_assigned_before_prepare() -> None:
    accelerator = Accelerator(cpu=True)
    assert batches(accelerator, 4) == ([[0, 1]], [[2, 3]])[RANK]
    accelerator.dataloader_config = DataLoaderConfiguration(split_batches=True)
    assert accelerator.split_batches
    assert batches(accelerator, 4) == ([[0], [2]], [[1], [3]])[RANK]
    accelerator.dataloader_config = DataLoaderConfiguration()
    accelerator.dataloader_config.dispatch_batches = True
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(4.0)), 2))
    assert type(loader).__name__ == "DataLoaderDispatcher"
    assert [batch.tolist() for (batch,) in loader] == ([[0, 1]], [[2, 3]])[RANK]


@case
def split_batches_is_ignored_as_an_argument_but_used_as_a_setting() -> None:
    for args, given in (((), {"split_batches": True}), ((True, True), {"cpu": True})):
        with pytest.warns(UserWarning, match="split_batches=True.* has no effect"):
            ignores = Accelerator(*args, **{"cpu": True, **given})
        assert not ignores.split_batches
        assert batches(ignores, 4) == ([[0, 1]], [[2, 3]])[RANK]
    config = DataLoaderConfiguration(split_batches=True)
    honours = Accelerator(cpu=True, split_batches=False, dataloader_config=config)
    assert batches(honours, 4) == ([[0], [2]], [[1], [3]])[RANK]


@case
def dispatched_loader_skips_batches_of_each_rank() -> None:
    config = DataLoaderConfiguration(dispatch_batches=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(12.0)), 2))
    skipped = accelerator.skip_first_batches(loader, 2)
    assert [batch.tolist() for (batch,) in skipped] == ([[8, 9]], [[10, 11]])[RANK]


@case
def debug_mode_can_be_turned_on_for_later_collectives() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state.debug = True
    assert PartialState().debug
    with pytest.raises(DistributedOperationException, match="do not match"):
        accelerator.gather(torch.ones(1 + RANK))
    PartialState().debug = False
    assert accelerator.gather(torch.ones(1)).tolist() == [1.0, 1.0]


@case
def loaders_synchronise_the_assigned_generator_types() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.rng_types = ["torch"]
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(4.0)), 2))
    torch.manual_seed(RANK)
    next(iter(loader))
    state = torch.get_rng_state().sum().reshape(1)
    assert len(set(accelerator.gather(state).tolist())) == 1


if __name__ == "__main__":
    run_cases()
