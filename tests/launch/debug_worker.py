"""Two ranks in debug mode, with backends that average gradients and one that forgets to."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from worker import PG_TIMEOUT, RANK, write_result

from accelerate_core import Accelerator, Backend
from accelerate_core.errors import DistributedOperationException


class Forgets(Backend):
    name = "forgets"
    api_version = (1, 0)
    reduces_gradients = "backward"


class ForgetsLater(Forgets):
    """Averages gradients in the first four steps only."""

    name = "forgets_later"
    seen = 0

    def backward(self, accelerator: Any, loss: Any, kwargs: Any) -> None:
        super().backward(accelerator, loss, kwargs)
        self.seen += 1
        for parameter in accelerator.models[-1].parameters():
            if self.seen <= 4:
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2

    def prepare_model(self, accelerator: Any, model: Any, evaluation_mode: bool) -> Any:
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), src=0)
        return model


class Never(Forgets):
    name = "never"
    reduces_gradients = "never"


def train(backend: Any, steps: int = 3) -> list[Any]:
    torch.manual_seed(0)
    with Accelerator(cpu=True, backend=backend, process_group_timeout=PG_TIMEOUT) as accelerator:
        model = torch.nn.Linear(3, 2)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(1, steps + 1):
            loss = model(torch.full((4, 3), float(RANK + step))).pow(2).mean()
            accelerator.backward(loss)
            try:
                optimizer.step()
            except DistributedOperationException as error:
                return [step, str(error)]
            optimizer.zero_grad()
    return [0, ""]


write_result(
    [*(train(backend) for backend in (Forgets, Never, "ddp", "fsdp2")), train(ForgetsLater, 14)]
)
