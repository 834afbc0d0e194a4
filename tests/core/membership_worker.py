"""A replica of `idea_plugins.Replicas`, which records the samples of the steps that it took."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch.nn.functional import mse_loss
from worker import RANK, flat, write_result

STORE = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
os.environ |= {"REPLICA": str(RANK), "REPLICAS": "0,1", "REPLICA_STORE": STORE}
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

from accelerate_core import Accelerator  # noqa: E402 - after the variables are set

SAMPLES, DIES_AT = 96, 8
WORKERS, JOINS_AT = map(int, sys.argv[1:])


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.sin(torch.arange(4) + float(index))


def report(result: Any) -> None:
    os.environ["RANK"] = str(RANK)
    write_result(result)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(Numbers(), 2, shuffle=True, num_workers=WORKERS)
    if RANK == 2:
        torch.rand(7)  # the order must come from the replicas that train
    accelerator = Accelerator(cpu=True, backend="replicas")
    net = torch.nn.Linear(4, 1)
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), loader
    )
    backend = accelerator.backend
    if RANK == 2:
        loader.load_state_dict(backend.position)
    seen: list[list[int]] = []
    for numbers, x in loader:
        if backend.steps == JOINS_AT - 1:
            backend.store.set("invited", "")
            backend.store.wait(["joins"])
        if RANK == 1 and backend.steps == DIES_AT:
            report([seen, accelerator.membership, None])
            os._exit(0)
        accelerator.backward(mse_loss(model(x), x.sum(1, keepdim=True)))
        optimizer.step()
        if not optimizer.step_was_skipped:
            seen.append(numbers.tolist())
        optimizer.zero_grad()
    report([seen, accelerator.membership, flat(model).tolist()])
    accelerator.end_training()


if __name__ == "__main__":
    main()
