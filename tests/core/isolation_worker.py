"""Two ranks: process groups that end and start again, and several Accelerators at once."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from worker import PG_TIMEOUT, RANK, SIZE, case, flat, run_cases, same_on_ranks

from accelerate_core import Accelerator
from accelerate_core.errors import ConfigurationError, RuntimeConflictError
from accelerate_core.utils import DataLoaderConfiguration, InitProcessGroupKwargs


def accelerate(**arguments: Any) -> Accelerator:
    return Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT, **arguments)


def work(accelerator: Accelerator) -> None:
    """Run a collective and a training step."""
    assert accelerator.gather(torch.tensor([RANK])).tolist() == list(range(SIZE))
    torch.manual_seed(RANK)
    net = nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    accelerator.backward(model(torch.randn(3, 4)).square().mean())
    optimizer.step()
    assert same_on_ranks(flat(model))
    assert accelerator.gather_for_metrics([RANK]) == list(range(SIZE))


@case
def accelerator_does_not_write_environment_variables() -> None:
    before, order = dict(os.environb), list(os.environb)
    with accelerate(mixed_precision="bf16") as accelerator:
        assert dict(os.environb) == before
        assert list(os.environb) == order
        work(accelerator)
    if b"TORCHINDUCTOR_CACHE_DIR" not in before:
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch sets it during training
    assert dict(os.environb) == before


@case
def new_accelerator_works_after_the_last_has_ended() -> None:
    for _ in range(3):
        assert not dist.is_initialized()
        accelerator = accelerate()
        work(accelerator)
        accelerator.end_training()
    assert not dist.is_initialized()


@case
def process_group_ends_with_the_last_accelerator() -> None:
    first, second = accelerate(), accelerate(mixed_precision="bf16")
    first.end_training()
    assert dist.is_initialized()
    work(second)
    third = accelerate(gradient_accumulation_steps=2)
    second.end_training()
    work(third)
    third.end_training()
    assert not dist.is_initialized()


@case
def many_accelerators_leak_nothing() -> None:
    references = []
    for _ in range(10):
        with accelerate() as accelerator:
            work(accelerator)
        references.append(weakref.ref(accelerator))
    del accelerator
    gc.collect()
    assert [reference() for reference in references] == [None] * 10


@case
def users_process_group_is_used_and_not_destroyed() -> None:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("own", store), rank=RANK, world_size=SIZE
    )
    for precision in ("no", "bf16"):  # the group's store still contains the first one's entries
        with accelerate(mixed_precision=precision) as accelerator:
            work(accelerator)
    assert dist.is_initialized(), "a process group that the script started must not be destroyed"
    dist.destroy_process_group()
    with accelerate() as accelerator:
        work(accelerator)


@case
def process_group_timeout_can_be_set() -> None:
    handler = InitProcessGroupKwargs(timeout=17)
    for arguments in ({"process_group_timeout": 17}, {"kwargs_handlers": [handler]}):
        with Accelerator(cpu=True, **arguments) as accelerator:
            work(accelerator)
            group = dist.distributed_c10d._get_default_group()
            options = group._get_backend(torch.device("cpu")).options
            assert options._timeout.total_seconds() == 17


@case
def accelerator_works_after_an_exception_on_all_ranks() -> None:
    for _ in range(2):
        try:
            with accelerate() as accelerator:
                raise ValueError("on every rank")
        except ValueError:
            pass
        work(accelerate())
    del accelerator
    gc.collect()


@case
def different_loader_configurations_are_refused() -> None:
    config = DataLoaderConfiguration(dispatch_batches=RANK == 1)
    with pytest.raises(ConfigurationError, match=r"dataloader_config\.dispatch_batches is False"):
        accelerate(dataloader_config=config)


@case
def another_timeout_is_refused_while_the_process_group_runs() -> None:
    first = accelerate()
    with pytest.raises(RuntimeConflictError, match=r"timeout of 5 s .* already runs with"):
        Accelerator(cpu=True, process_group_timeout=5)
    first.end_training()


@case
def process_group_does_not_depend_on_garbage_collection() -> None:
    """Garbage collection differs between ranks, but the group must end at the same time on all."""
    gc.collect()
    gc.disable()
    try:
        dropped = accelerate()
        work(dropped)
        second = accelerate()
        del dropped
        if RANK == 0:
            gc.collect()
        second.end_training()
        with accelerate() as third:
            work(third)
    finally:
        gc.enable()


if __name__ == "__main__":
    run_cases(sys.argv[1:])
