"""A small model, its data and its training: under the plugin, and in plain PyTorch."""

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

from accelerate_core.accelerator import Accelerator
from accelerate_testing.context import CheckContext

#: Samples in the batch of one rank.
BATCH = 4
RATE, MOMENTUM = 0.03, 0.9
#: Seconds a thread is held back at most: less than what a check may do nothing.
_HELD = 5.0

Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """Two layers and a buffer that matters; different weights for different seeds."""

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


#: The optimizer of `plain_training`, one without a state, and one with several tensors per parameter.
sgd = partial(torch.optim.SGD, lr=RATE, momentum=MOMENTUM)
no_momentum = partial(torch.optim.SGD, lr=RATE)
adam = partial(torch.optim.Adam, lr=0.01)


def optimizer_of(ctx: CheckContext) -> Callable[[Any], Any]:
    """Return the optimizer of checks that could have any: the one that `options` name, or `sgd`."""
    name = ctx.options.get("optimizer")
    return sgd if name is None else partial(getattr(torch.optim, str(name)), lr=0.01)


def plain_training(
    batches: Sequence[Batch],
    *,
    optimizer: Callable[[Any], Any] = sgd,
    per_step: int = 1,
    per_epoch: int | None = None,
    max_norm: float | None = None,
    clip_value: float | None = None,
    skipped: Collection[int] = (),
) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """Train `Net(0)` in one process with nothing but torch.

    Args:
        batches: whole batches, of all ranks together.
        optimizer: makes the optimizer of parameters.
        per_step: batches per optimizer step.
        per_epoch: batches per epoch, after which there is a step in any case.
        skipped: batches after which there is no step, as where a scaled loss has overflowed.

    Returns:
        The loss of each batch, the weights in the end, the norms before clipping.
    """
    model = Net(0)
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
    """Return this rank's part of each gradient there is."""
    grads: list[Any] = [p.grad for p in parameters if p.grad is not None]
    return [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]


def seed(number: int, drawn: int = 0) -> None:
    """Seed the generators a script draws from, and draw so many numbers of each."""
    random.seed(number)
    torch.manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
    for _ in range(drawn):
        draw("")


def draw(after: str) -> dict[str, float]:
    """Return a number of each of those generators, named with what was done before."""
    told = {"random": random.random(), "torch": float(torch.rand(()))}
    if "numpy" in sys.modules:
        told["numpy"] = float(sys.modules["numpy"].random.rand())
    return {f"{name} after {after}": value for name, value in told.items()}


@dataclass(eq=False)
class Trainer:
    """A model, its optimizer and perhaps a scheduler, prepared by an Accelerator under the plugin."""

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
        """Prepare a model, and an optimizer of its parameters.

        Args:
            optimizer: makes it; else `optimizer_of` does.
            net: the model; else a `Net(seed)` on the main process, and others on the other ranks:
                preparing makes all of them that one.
            accelerator: the one to use; else one is made, with `arguments`.
            schedule: makes a scheduler of the optimizer.
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
        """Return this rank's batches, of so many samples in turn, and the whole ones of all ranks."""
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
        """Train; return the mean loss over the ranks of each batch."""
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
        """Train; fail unless losses and weights are those of `plain_training(..., **how)`.

        Returns:
            The losses, and the norms before clipping that plain training had.
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
        """Return the weights that training on these batches is to end with: those of `plain_training`.

        A backend that is not exact is held against itself: the script makes one loss of the batches of
        a step. This Accelerator ends first.
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
        """Go back from a loss, and step; a scheduler may take a metric."""
        self.accelerator.backward(loss)
        self.update(*metric)

    def update(self, *metric: float) -> None:
        """Step with the gradients there are, and drop them."""
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
        """Fail unless the ranks compute the same from the same samples."""
        generator = torch.Generator().manual_seed(8)
        x = torch.randn(BATCH, 6, generator=generator).to(self.accelerator.device)
        with torch.no_grad():
            told = self.model(x).float().cpu().flatten().tolist()
        rounded = [round(value, 4) for value in told]
        self.ctx.alike(self.accelerator, rounded, f"outputs of {what}")


class ResumableTrainer(Trainer):
    """A run over a loader that shuffles, with accumulation and a schedule, to be taken up again."""

    #: Batches of an epoch, and where a run ends; two make a step, so an odd number is inside of a cycle.
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
        count = self.BATCHES * BATCH * ctx.size
        x = torch.randn(count, 6, generator=torch.Generator().manual_seed(9))
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), BATCH, shuffle=True)
        *made, prepared = accelerator.prepare(model, its, StepLR(its, 1, 0.9), loader)
        self.loader: Any = prepared  # it has a position
        super().__init__(ctx, accelerator, *made)
        self.done = 0
        self._left = None

    def go_on(self, until: int) -> None:
        """Train until so many batches of the epoch were seen, in one loop over the loader."""
        self._left = self._left or iter(self.loader)
        while self.done < until:
            batch = next(self._left)
            with self.accelerator.accumulate(self.model):
                self.step(loss_of(self.model, batch))
            self.done += 1

    def load(self, target: str | None = None, **how: Any) -> str:
        """Load, and begin the loop anew."""
        loaded = self.accelerator.load_state(target, **how)
        self.done = int(self.loader.state_dict()["batches_seen"])
        self._left = None
        return loaded


@contextmanager
def held_threads() -> Iterator[None]:
    """Let no thread that is started in the block work before its end.

    So whatever a plugin does beside the training comes after the training in the block. Where
    the block itself waits for a thread, that one begins after some seconds all the same.
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
