"""Only rank 0 steps a scheduler with a metric, and trains on."""

from __future__ import annotations

import warnings
from datetime import timedelta

import torch
from worker import write_result

from accelerate_core import Accelerator
from accelerate_core.distributed import process
from accelerate_core.errors import RuntimeConflictError

if __name__ == "__main__":
    process._WARN_AFTER = timedelta(seconds=1)
    accelerator = Accelerator(cpu=True, process_group_timeout=3)
    net = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd)
    model, optimizer, scheduler = accelerator.prepare(net, sgd, plateau)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for _ in range(2):
                accelerator.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                if accelerator.is_main_process:
                    scheduler.step(1.0)
        except (RuntimeConflictError, RuntimeError) as error:
            write_result(
                [f"{type(error).__name__}: {error}", *[str(one.message) for one in caught]]
            )
