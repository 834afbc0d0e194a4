"""Two trainers and an evaluator, each role a world of its own: `roles_worker.py train|evaluate`."""

from __future__ import annotations

import os
import sys

import torch
from small_model import Tower, data
from torch.nn.functional import mse_loss
from worker import PG_TIMEOUT, RANK, flat, write_result

STEPS = 4


def main(role: str) -> None:
    os.environ["ROLES_RANK"] = str(RANK if role == "train" else 2)

    from accelerate_core import Accelerator

    torch.set_num_threads(1)
    precision = "no" if role == "train" else "bf16"  # a world has its own settings
    with Accelerator(
        cpu=True, mixed_precision=precision, process_group_timeout=PG_TIMEOUT
    ) as accelerator:
        bridge = accelerator.bridge
        net = Tower()
        x, y = data()
        losses = []
        if role == "train":
            model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
        for _ in range(STEPS):
            if role == "train":
                accelerator.backward(mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                net = accelerator.unwrap_model(model)
            # Trainer 0 sends the weights, and every process of every role receives the loss.
            weights = flat(net)
            bridge.broadcast(weights, root=0).wait()
            torch.nn.utils.vector_to_parameters(weights, net.parameters())
            with torch.no_grad():
                loss = mse_loss(net(x), y).reshape(1)
            bridge.broadcast(loss, root=2).wait()
            losses.append(loss.item())
        write_result([accelerator.num_processes, accelerator.mixed_precision, losses])


if __name__ == "__main__":
    main(sys.argv[1])
