"""A small model, its data, and its training with the plugin and in plain PyTorch."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from accelerate_core.plugin import Accelerator
from accelerate_testing.context import CheckContext

#: Samples in the batch of one rank.
BATCH = 4
RATE, MOMENTUM = 0.03, 0.9
#: Seconds for which a thread is held back at most; less than the time a check may be idle.
_HELD = 5.0

Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """Two layers and a buffer that changes the output; the weights depend on the seed."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.inner = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
            self.out = nn.Linear(16, 1)
        self.register_buffer("shift", torch.full((1,), 0.1 * seed))

    def forward(self, x: torch.Tensor) -> Any:
        """Samples [batch, 6] in, numbers [batch, 1] out."""
        return self.out(self.inner(x)) + self.shift


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """Return the mean squared error of a batch."""
    return nn.functional.mse_loss(model(batch[0]).float(), batch[1])


#: Optimizers: that of `plain_training`, one without state, and one with several tensors per parameter.
sgd = partial(torch.optim.SGD, lr=RATE, momentum=MOMENTUM)
no_momentum = partial(torch.optim.SGD, lr=RATE)
adam = partial(torch.optim.Adam, lr=0.01)


def optimizer_of(ctx: CheckContext) -> Callable[[Any], Any]:
    """Return the optimizer for checks that could use any: the one in `options`, or `sgd`."""
    name = ctx.options.get("optimizer")
    return sgd if name is None else partial(getattr(torch.optim, str(name)), lr=0.01)


def plain_training(
    batches: Sequence[Batch],
    *,
    net: nn.Module | None = None,
    optimizer: Callable[[Any], Any] = sgd,
    per_step: int = 1,
    per_epoch: int | None = None,
    max_norm: float | None = None,
    clip_value: float | None = None,
    skipped: Collection[int] = (),
) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """Train a model in one process with plain PyTorch.

    Args:
        batches: whole batches, of all ranks together.
        net: the model; default: `Net(0)`.
        optimizer: creates the optimizer from parameters.
        per_step: batches per optimizer step.
        per_epoch: batches per epoch; the optimizer always steps at its end.
        skipped: indices of batches after which the optimizer does not step, as after an overflow.

    Returns:
        The loss of each batch, the final weights, and the norms before clipping.
    """
    model = Net(0) if net is None else net
    its = optimizer(model.parameters())
    losses, norms = [], []
    for index, batch in enumerate(batches):
        loss = loss_of(model, batch)
        torch.autograd.backward(loss / per_step)
        losses.append(loss.item())
        done = (index + 1) % (per_epoch or len(batches))
        if done % per_step == 0:
            if max_norm is not None:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
            if clip_value is not None:
                nn.utils.clip_grad_value_(model.parameters(), clip_value)
            if index not in skipped:
                its.step()
            its.zero_grad()
    return losses, dict(model.state_dict()), norms


def local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's part of each gradient."""
    grads: list[Any] = [p.grad for p in parameters if p.grad is not None]
    return [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]


def seed(number: int, drawn: int = 0) -> None:
    """Seed the generators that a script uses, and draw some numbers from each."""
    random.seed(number)
    torch.manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
    for _ in range(drawn):
        draw("")


def draw(after: str) -> dict[str, float]:
    """Return a number from each of these generators; `after` says in its name what was done before."""
    told = {"random": random.random(), "torch": float(torch.rand(()))}
    if "numpy" in sys.modules:
        told["numpy"] = float(sys.modules["numpy"].random.rand())
    return {f"{name} after {after}": value for name, value in told.items()}


@dataclass(eq=False)
class Trainer:
    """A model, its optimizer and perhaps a scheduler, prepared by an Accelerator with the plugin."""

    ctx: CheckContext
    accelerator: Accelerator
    model: Any
    optimizer: Any
    scheduler: Any = None

    @classmethod
    def begin(
        cls,
        ctx: CheckContext,
        optimizer: Callable[[Any], Any] | None = None,
        *,
        net: nn.Module | None = None,
        seed: int = 0,
        accelerator: Accelerator | None = None,
        schedule: Callable[[Any], Any] | None = None,
        **arguments: Any,
    ) -> Trainer:
        """Prepare a model and an optimizer of its parameters.

        Args:
            optimizer: creates the optimizer; default: `optimizer_of`.
            net: the model; default: `Net(seed)` on the main process and different ones on the other
                ranks, because preparing must send the weights of the main process.
            accelerator: default: a new one, with `arguments`.
            schedule: creates a scheduler of the optimizer.
        """
        accelerator = accelerator or ctx.accelerator(**arguments)
        net = Net(seed + accelerator.process_index) if net is None else net
        make_optimizer = optimizer or optimizer_of(ctx)
        made = [net, make_optimizer(net.parameters())]
        if schedule:
            made.append(schedule(made[1]))
        return cls(ctx, accelerator, *accelerator.prepare(*made))

    @property
    def exact(self) -> bool:
        """Whether the backend trains as one process would on the batches of all ranks."""
        return bool(self.accelerator.backend.supports.get("exact", True))

    def batches(self, count: int, *sizes: int) -> tuple[list[Batch], list[Batch]]:
        """Return this rank's batches, with `sizes` samples in turn, and the batches of all ranks joined."""
        accelerator = self.accelerator
        index, parts = accelerator.hooks.data_shard()
        generator = torch.Generator().manual_seed(5)
        mine, whole = [], []
        for _, size in zip(range(count), cycle(sizes or (BATCH,)), strict=False):
            x = torch.randn(size * parts, 6, generator=generator)
            y = x.sum(1, keepdim=True) + 0.3
            whole.append((x, y))
            part = slice(index * size, (index + 1) * size)
            mine.append((x[part].to(accelerator.device), y[part].to(accelerator.device)))
        return mine, whole

    def train(
        self, batches: Iterable[Any], before_step: Callable[[], Any] = lambda: None
    ) -> list[float]:
        """Train, and return the loss of each batch, as the mean over the ranks."""
        losses = []
        for batch in batches:
            with self.accelerator.accumulate(self.model):
                loss = loss_of(self.model, batch)
                self.accelerator.backward(loss)
                losses.append(float(self.accelerator.reduce(loss.detach(), "mean")))
                before_step()
                self.update()
        return losses

    def train_as_plain(
        self, count: int, before_step: Callable[[], Any] = lambda: None, **how: Any
    ) -> tuple[list[float], list[float]]:
        """Train, and fail unless losses and weights equal those of `plain_training(..., **how)`.

        Returns:
            The losses, and the norms before clipping in plain training.
        """
        mine, whole = self.batches(count)
        losses = self.train(mine, before_step)
        expected, weights, norms = plain_training(whole, **how)
        self.ctx.close(losses, expected, "losses")
        self.ctx.close(self.weights(), weights, "weights")
        return losses, norms

    def reference(
        self, mine: list[Batch], whole: list[Batch], per_step: int = 1, per_epoch: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the weights that training on these batches must end with: those of `plain_training`.

        A backend that is not exact is compared with itself, with one loss for all batches of a step.
        This Accelerator ends first.
        """
        if self.exact:
            return plain_training(whole, per_step=per_step, per_epoch=per_epoch)[1]
        self.accelerator.end_training()
        own = Trainer.begin(self.ctx)
        length = per_epoch or len(mine)
        for first in range(0, len(mine), length):
            epoch = mine[first : first + length]
            for at in range(0, length, per_step):
                xs, ys = zip(*epoch[at : at + per_step], strict=True)
                outs = torch.split(own.model(torch.cat(xs)).float(), [len(x) for x in xs])
                losses = [nn.functional.mse_loss(*both) for both in zip(outs, ys, strict=True)]
                own.step(torch.stack(losses).sum() / per_step)
        return own.weights()

    def step(self, loss: torch.Tensor, *metric: float) -> None:
        """Call backward on a loss and step; a scheduler may take a metric."""
        self.accelerator.backward(loss)
        self.update(*metric)

    def update(self, *metric: float) -> None:
        """Step with the current gradients, then clear them."""
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step(*metric)
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the whole state dict of the main process, on every rank."""
        state = self.accelerator.get_state_dict(self.model)
        held = {key: value.detach().cpu().clone() for key, value in state.items()}
        return dict(self.accelerator.communicator.broadcast_object(held, 0))

    def same_everywhere(self, what: str) -> None:
        """Fail unless all ranks compute the same outputs from the same samples."""
        generator = torch.Generator().manual_seed(8)
        x = torch.randn(BATCH, 6, generator=generator).to(self.accelerator.device)
        with torch.no_grad():
            told = self.model(x).float().cpu().flatten().tolist()
        rounded = [round(value, 4) for value in told]
        self.ctx.alike(self.accelerator, rounded, f"outputs of {what}")


class ResumableTrainer(Trainer):
    """A run with a shuffling loader, accumulation and a schedule, which can be resumed."""

    #: Batches of an epoch, and of a run. Two batches make a step, so an odd number is inside a cycle.
    BATCHES, END = 12, 10
    _left: Iterator[Any] | None

    def __init__(
        self,
        ctx: CheckContext,
        seed: int,
        net: Callable[[], nn.Module],
        optimizer: Callable[[Any], Any],
        **arguments: Any,
    ) -> None:
        accelerator = ctx.accelerator(gradient_accumulation_steps=2, **arguments)
        torch.manual_seed(seed)
        model: Any = net()
        its = optimizer(model.parameters())
        if not accelerator.backend.supports.get("exact", True):
            # 17 steps: a backend that averages weights every 8 steps does so twice after the save.
            self.BATCHES, self.END = 36, 34
        count = self.BATCHES * BATCH * ctx.size
        x = torch.randn(count, 6, generator=torch.Generator().manual_seed(9))
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), BATCH, shuffle=True)
        *made, prepared = accelerator.prepare(model, its, StepLR(its, 1, 0.9), loader)
        self.loader: Any = prepared  # it has a position
        super().__init__(ctx, accelerator, *made)
        self.done = 0
        self._left = None

    def go_on(self, until: int) -> None:
        """Train until this many batches of the epoch have been seen, in one loop over the loader."""
        self._left = self._left or iter(self.loader)
        while self.done < until:
            batch = next(self._left)
            with self.accelerator.accumulate(self.model):
                self.step(loss_of(self.model, batch))
            self.done += 1

    def load(self, target: str | None = None, **how: Any) -> str:
        """Load a checkpoint and start a new loop."""
        loaded = self.accelerator.load_state(target, **how)
        self.done = int(self.loader.state_dict()["batches_seen"])
        self._left = None
        return loaded


@contextmanager
def held_threads() -> Iterator[None]:
    """Hold back every thread that is started in the block until the block ends.

    Whatever a plugin does in the background then happens after the training in the block. If the
    block itself waits for a thread, that thread starts after some seconds.
    """
    ended = threading.Event()
    run = threading.Thread.run

    def later(thread: threading.Thread) -> None:
        ended.wait(_HELD)
        run(thread)

    try:
        with mock.patch.object(threading.Thread, "run", later):
            yield
    finally:
        ended.set()
