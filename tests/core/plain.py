"""Reference runs in plain PyTorch: on one process, and with a handwritten DDP loop.

As a script under torchrun it runs the DDP loop, with precisions as arguments.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
from digits import batches, make_net
from torch.nn.functional import cross_entropy

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
#: 8 optimizer steps of 2 micro-batches.
STEPS, ACCUMULATION = 8, 2
#: Samples per micro-batch on each rank.
BATCH = 8
MAX_NORM = 1.0

History = dict[str, list[float]]


def make_optimizer(model: torch.nn.Module, scheduler_total: int) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 - 0.9 * step / scheduler_total
    )
    return optimizer, scheduler


def one_process(world: int, scheduler_steps: int, precision: str = "no") -> History:
    """Train with an n times larger batch, and call the scheduler `scheduler_steps` times per step."""
    model = make_net()
    data = batches(STEPS * ACCUMULATION * BATCH * world, BATCH * world)
    return _train(model, data, scheduler_steps, precision, STEPS * scheduler_steps)


def by_hand(precision: str) -> History:
    """Train with DDP, no_sync, autocast and GradScaler, as in PyTorch's tutorials."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(make_net())
    data = batches(STEPS * ACCUMULATION * BATCH * world, BATCH)[rank::world]
    return _train(model, data, world, precision, STEPS * world)


def _train(model: Any, data: Any, scheduler_steps: int, precision: str, total: int) -> History:
    optimizer, scheduler = make_optimizer(model, total)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    history: History = {"losses": [], "norms": [], "rates": [], "scales": []}
    for index, (x, y) in enumerate(data):
        last = (index + 1) % ACCUMULATION == 0
        wrapped = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        with model.no_sync() if wrapped and not last else nullcontext():
            with _autocast(precision):
                loss = cross_entropy(model(x), y)
            scaler.scale(loss / ACCUMULATION).backward()
        history["losses"].append(_mean(loss.detach()))
        if not last:
            continue
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        history["norms"].append(norm.item())
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        for _ in range(scheduler_steps if scaler.get_scale() >= before else 0):
            scheduler.step()
        history["rates"].append(scheduler.get_last_lr()[0])
        history["scales"].append(scaler.get_scale())
    history["weights"] = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()
    return history


def _autocast(precision: str) -> Any:
    if precision == "no":
        return nullcontext()
    return torch.autocast("cpu", dtype=DTYPES[precision])


def _mean(loss: torch.Tensor) -> float:
    if torch.distributed.is_initialized():
        loss = loss.clone()
        torch.distributed.all_reduce(loss)
        loss /= torch.distributed.get_world_size()
    return loss.item()


if __name__ == "__main__":
    from worker import PG_TIMEOUT, write_result

    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=PG_TIMEOUT))
    assert not any(name.startswith("accelerate_core") for name in sys.modules)
    write_result({precision: by_hand(precision) for precision in sys.argv[1:]})
    torch.distributed.destroy_process_group()
