"""Training as in real scripts: frozen parts, parameter groups, closures, custom optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from accelerate_testing.checks import SAVE, STEP, check
from accelerate_testing.context import CheckContext
from accelerate_testing.training import (
    RATE,
    Batch,
    Net,
    Trainer,
    loss_of,
    no_momentum,
    plain_training,
)


class Tuned(nn.Module):
    """A frozen body, a counter and a head; all depend on the seed."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body = nn.Linear(6, 8).requires_grad_(False)
            self.head = nn.Linear(8, 1)
        self.register_buffer("seen", torch.tensor([10 * seed]))

    def forward(self, x: torch.Tensor) -> Any:
        """Samples [batch, 6] in, numbers [batch, 1] out."""
        return self.head(torch.tanh(self.body(x)))


@check("backend", hooks=f"prepare_model {STEP}")
def fine_tuning(ctx: CheckContext) -> None:
    """A model with a frozen part trains as in one process, and the frozen part does not change."""
    accelerator = ctx.accelerator()
    net = Tuned(0 if accelerator.is_main_process else 1 + accelerator.process_index)
    trained = no_momentum([p for p in net.parameters() if p.requires_grad])
    trainer = Trainer.begin(ctx, lambda _: trained, net=net, accelerator=accelerator)
    ctx.equal(trainer.model.training, True, "the prepared model is in training mode")
    inner = accelerator.unwrap_model(trainer.model)
    names = [name for name, p in inner.named_parameters() if p.requires_grad]
    ctx.equal(names, ["head.weight", "head.bias"], "parameters that are trained")
    mine, whole = trainer.batches(4)
    trainer.train(mine)
    expected = Tuned(0)
    got = trainer.weights()
    ctx.close({name: got[name] for name in got if "body" in name},
              {f"body.{name}": value for name, value in expected.body.state_dict().items()},
              "the frozen part", 1e-6)  # fmt: skip
    moved = float((got["head.weight"] - expected.head.weight.detach()).abs().max())
    assert moved > 0, "the head did not change, so nothing is trained"
    ctx.alike(accelerator, inner.get_buffer("seen").tolist(), "a buffer of integers")
    if trainer.exact:
        _train_plainly(expected, no_momentum(expected.head.parameters()), whole)
        ctx.close(got, dict(expected.state_dict()), "weights")
        trainer.same_everywhere("a model with a frozen part")


def _train_plainly(model: nn.Module, optimizer: Any, batches: Iterable[Batch]) -> None:
    """Train with plain PyTorch."""
    for batch in batches:
        torch.autograd.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()


class Counting(torch.optim.Optimizer):
    """Takes smaller steps each time; the number of steps in its state is an int, not a tensor."""

    def __init__(self, params: Iterable[Any], lr: float = RATE) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step; a closure is ignored."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    times = self.state[p].setdefault("times", 0) + 1
                    self.state[p]["times"] = times
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(p.grad, alpha=-group["lr"] / times)


def _groups(model: Net) -> list[dict[str, Any]]:
    return [
        {"params": list(model.inner.parameters()), "lr": 0.02, "weight_decay": 0.25},
        {"params": list(model.out.parameters()), "lr": 0.002, "weight_decay": 0.5},
    ]


@check("backend", hooks=f"prepare_optimizer {STEP} {SAVE}")
def groups(ctx: CheckContext) -> str:
    """Parameter groups keep their learning rates, and the optimizer keeps its state, even in a checkpoint."""
    accelerator = ctx.accelerator()
    own = "optimizer" not in accelerator.backend.owns
    kind: Any = Counting if own else torch.optim.AdamW
    net = Net(accelerator.process_index)
    trainer = Trainer.begin(ctx, lambda _: kind(_groups(net)), net=net, accelerator=accelerator)
    optimizer = trainer.optimizer
    mine, whole = trainer.batches(4)
    trainer.train(mine[:2])
    if trainer.exact:
        expected = Net(0)
        _train_plainly(expected, kind(_groups(expected)), whole[:2])
        ctx.close(trainer.weights(), dict(expected.state_dict()), "weights")
    path = accelerator.save_state(str(ctx.scratch("groups")))
    trainer.train(mine[2:])
    after = trainer.weights()
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 1.0
    accelerator.load_state(path)
    for key, kept in (("lr", [0.02, 0.002]), ("weight_decay", [0.25, 0.5])):
        rates = [group[key] for group in optimizer.param_groups]
        ctx.close(rates, kept, f"{key} after load_state", 1e-12)
    trainer.train(mine[2:])
    ctx.close(trainer.weights(), after, "weights two steps later", 1e-6)
    if own:
        accelerator.backward(loss_of(trainer.model, mine[0]))
        optimizer.zero_grad()
        held = [p.grad for group in optimizer.param_groups for p in group["params"]]
        ctx.equal(held, [None] * len(held), "gradients of all groups after zero_grad()")
    return f"{len(rates)} groups"


@check("backend", hooks="optimizer_step zero_grad backward")
def calls(ctx: CheckContext) -> None:
    """`step` calls a closure, `zero_grad` respects `set_to_none`, and `backward` passes on its arguments."""
    trainer = Trainer.begin(ctx)
    accelerator = trainer.accelerator
    model = trainer.model
    optimizer = trainer.optimizer
    if "optimizer" in accelerator.backend.owns:
        ctx.skip("its engine owns the optimizer")
    mine, whole = trainer.batches(3)
    called = 0

    def closure(batch: Batch) -> torch.Tensor:
        nonlocal called
        called += 1
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        return loss

    for batch in mine:
        optimizer.step(lambda batch=batch: closure(batch))
    ctx.equal(called, len(mine), "calls of the closure")
    if trainer.exact:
        ctx.close(trainer.weights(), plain_training(whole)[1], "weights")
    held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    optimizer.zero_grad(set_to_none=False)
    if held:
        zeros = [p.grad is not None and not bool(p.grad.any()) for p in held]
        ctx.equal(all(zeros), True, "gradients are zeros after zero_grad(set_to_none=False)")
    optimizer.zero_grad(set_to_none=True)
    ctx.equal([p.grad for p in held], [None] * len(held), "gradients after zero_grad()")
    loss = loss_of(model, mine[0])
    accelerator.backward(loss, retain_graph=True)
    try:
        accelerator.backward(loss)
    except RuntimeError as error:
        raise AssertionError(
            f"backward(retain_graph=True) did not retain the graph: {error}"
        ) from None
    optimizer.zero_grad()
