"""Runs longer than a few steps, with tensors larger than a few elements."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from accelerate_testing.checks import STEP, check
from accelerate_testing.context import CheckContext
from accelerate_testing.training import Trainer, plain_training

#: Steps of a run of an exact backend.
STEPS = 60
#: Steps before the targets of a rank are changed: 32 averages, if a backend takes one every 8 steps.
BEFORE = 256
#: Steps in which the ranks of a backend that is not exact must have learned from each other.
_MEET = (16, 256)

#: Weights of each rank after some steps, as bytes, by the name of the parameter.
Weights = list[dict[str, bytes]]


class Deep(nn.Module):
    """Three layers with tensors from one to 160,000 elements."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.inner = nn.Linear(6, 400)
            self.large = nn.Linear(400, 400)
            self.out = nn.Linear(400, 1)

    def forward(self, x: torch.Tensor) -> Any:
        """Samples [batch, 6] in, numbers [batch, 1] out."""
        return self.out(torch.tanh(self.large(torch.tanh(self.inner(x)))))


class Separate(nn.Module):
    """Three layers of different sizes, each of which only trains on its own outputs."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.small = nn.Linear(6, 1)
            self.medium = nn.Linear(6, 1_000)
            self.large = nn.Linear(6, 20_000)

    def forward(self, x: torch.Tensor) -> Any:
        """Samples [batch, 6] in, numbers [batch, 21_001] out."""
        return torch.cat([self.small(x), self.medium(x), self.large(x)], 1)


def _separate_loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradient for one output does not depend on the others."""
    losses: torch.Tensor = (model(x).float() - y).square().sum(1)
    return losses.mean()


slow = partial(torch.optim.SGD, lr=0.003)


@check("backend", hooks=f"prepare_model {STEP}")
def long_run(ctx: CheckContext) -> str:
    """Sixty steps on tensors of up to 160,000 elements equal those of one process on the whole batches."""
    trainer = Trainer.begin(ctx, slow, net=Deep())
    accelerator = trainer.accelerator
    if not trainer.exact:
        _, shares = accelerator.hooks.data_shard()
        accelerator.end_training()
        if shares == 1:  # all ranks train on the same samples
            return "not exact, and all ranks have the same samples"
        return f"not exact: what a rank learns late reaches all tensors in {_late_news(ctx)} steps"
    mine, whole = trainer.batches(6)
    losses = trainer.train(mine * (STEPS // 6))
    expected_losses, expected, _ = plain_training(whole * (STEPS // 6), net=Deep(), optimizer=slow)
    ctx.close(losses, expected_losses, "losses", 1e-4)
    ctx.close(trainer.weights(), expected, "weights", 1e-4)
    trainer.same_everywhere("the trained model")
    return f"{STEPS} steps, largest tensor {max(p.numel() for p in Deep().parameters())} elements"


def _late_news(ctx: CheckContext) -> int:
    """Return in how many steps every tensor of every rank depends on what another rank learns late."""
    missing = ""
    for count in _MEET:
        usual = _weights_after(ctx, count, -1)
        missing = ""
        for disturbed in (ctx.size - 1, 0):
            changed = _weights_after(ctx, count, disturbed)
            for rank in {*range(ctx.size)} - {disturbed}:
                alike = [n for n, held in usual[rank].items() if held and changed[rank][n] == held]
                if alike:
                    missing = f"{alike[0]!r} of rank {rank} does not depend on what rank {disturbed} learns"
        if not missing:
            return count
    raise AssertionError(
        f"in {count} steps after the first {BEFORE}, {missing}: the ranks train separately. If they "
        "synchronise less often, set that for the checks with the backend's settings."
    )


def _weights_after(ctx: CheckContext, count: int, disturbed: int) -> Weights:
    """Train, with other targets on one rank in the last `count` steps; return the weights of all ranks."""
    trainer = Trainer.begin(ctx, slow, net=Separate())
    accelerator = trainer.accelerator
    ((x, y),), _ = trainer.batches(1)
    for step in range(BEFORE + count):
        late = step >= BEFORE and accelerator.process_index == disturbed
        trainer.step(_separate_loss(trainer.model, x, y + 5.0 * late))
    held = {}
    for name, parameter in trainer.model.named_parameters():
        local: Any = parameter.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        held[name] = local.float().cpu().numpy().tobytes()
    every = accelerator.communicator.gather_object(held)
    accelerator.end_training()
    return list(every)
