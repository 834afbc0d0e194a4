"""What a check works with: Accelerators under the plugin, a small model, data, and plain PyTorch."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate_core.accelerator import Accelerator
from accelerate_testing.checks import Skip
from accelerate_testing.devices import missing_device, runs_on_cpu

__all__ = ["BATCH", "Lab", "Net", "draw", "loss_of", "plain_training", "seed"]

#: Samples in the batch of one rank.
BATCH = 4
RATE, MOMENTUM = 0.03, 0.9
#: Seconds a thread is held back at most.
_HELD = 20.0

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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Samples [batch, 6] in, numbers [batch, 1] out."""
        y: torch.Tensor = self.out(self.inner(x)) + self.shift
        return y


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """Return the mean squared error of a batch."""
    return nn.functional.mse_loss(model(batch[0]).float(), batch[1])


def plain_training(
    batches: Sequence[Batch],
    *,
    per_step: int = 1,
    per_epoch: int | None = None,
    max_norm: float | None = None,
    clip_value: float | None = None,
    skipped: Collection[int] = (),
) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """Train `Net(0)` in one process with nothing but torch.

    Args:
        batches: whole batches, of all ranks together.
        per_step: batches per optimizer step.
        per_epoch: batches per epoch, after which there is a step in any case.
        skipped: batches after which there is no step, as where a scaled loss has overflowed.

    Returns:
        The loss of each batch, the weights in the end, the norms before clipping.
    """
    model = Net(0)
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
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
                optimizer.step()
            optimizer.zero_grad()
    return losses, dict(model.state_dict()), norms


def seed(number: int) -> None:
    """Seed the generators a script draws from."""
    random.seed(number)
    torch.manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def draw(after: str) -> dict[str, float]:
    """Return a number of each of those generators, named with what was done before."""
    told = {"random": random.random(), "torch": float(torch.rand(()))}
    if "numpy" in sys.modules:
        told["numpy"] = float(sys.modules["numpy"].random.rand())
    return {f"{name} after {after}": value for name, value in told.items()}


@dataclass(eq=False)
class Lab:
    """One plugin under test, on one rank.

    Attributes:
        kind: its kind.
        name: its name.
        plugin: what chooses it: its name, or the class itself (backends only).
        folder: a directory all ranks share.
        timeout: seconds a collective may wait.
        options: what the suite's author says about it, by name of the check's own option.
    """

    kind: str
    name: str
    plugin: Any
    folder: Path
    timeout: float = 20.0
    options: Mapping[str, Any] = field(default_factory=dict)
    _made: list[Accelerator] = field(default_factory=list)

    rank: int = int(os.environ.get("RANK", "0"))
    size: int = int(os.environ.get("WORLD_SIZE", "1"))

    # --- Accelerators ---------------------------------------------------------------------------

    def accelerator(self, **arguments: Any) -> Accelerator:
        """Return an Accelerator under the plugin; it ends with the check.

        Raises:
            Skip: this machine has no device the plugin runs on.
        """
        if self.missing_device:
            self.skip(self.missing_device)
        given: dict[str, Any] = {"cpu": self.on_cpu}
        if self.size > 1:
            given["process_group_timeout"] = self.timeout
        if self.kind == "backend":
            given["backend"] = self.plugin
        elif self.kind == "precision":
            given["mixed_precision"] = self.name
        elif self.kind in ("checkpointer", "loaders"):
            given[self.kind] = self.name
        made = Accelerator(**{**given, **arguments})
        self._made.append(made)
        return made

    @cached_property
    def on_cpu(self) -> bool:
        """Whether the checks run on the CPU: unless the plugin says it cannot."""
        return runs_on_cpu(self.found)

    @cached_property
    def missing_device(self) -> str:
        """Why this machine has no device the plugin runs on, "" if it has."""
        return missing_device(self.found)

    @property
    def supports(self) -> Mapping[str, Any]:
        """What the plugin declares; a tracker's verbs are no such declarations."""
        said = getattr(self.found, "supports", {})
        return said if isinstance(said, Mapping) else {}

    @property
    def found(self) -> Any:
        """The plugin's class."""
        if not isinstance(self.plugin, str):
            return self.plugin
        from accelerate_core.plugins.discovery import find

        return find(self.kind, self.plugin, because="the conformance suite").load()

    def end(self) -> None:
        """End what the check has begun, also after a failure."""
        import torch.distributed as dist

        while self._made:
            accelerator = self._made.pop(0)
            if not accelerator._closed:
                accelerator.end_training()
            del accelerator  # nothing of it is left when garbage is collected
        gc.collect()
        if dist.is_available() and dist.is_initialized() and self.size > 1:
            dist.destroy_process_group()

    def abandon(self) -> None:
        """Drop what a failed check has left: no rank waits for another one."""
        import torch.distributed as dist

        from accelerate_core.distributed import process as runtime

        made, self._made = self._made, []
        for accelerator in made:
            accelerator._closed = True
            runtime.release(accelerator)
        del made
        gc.collect()
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()

    # --- work -----------------------------------------------------------------------------------

    def net(self, accelerator: Accelerator, seed: int = 0) -> Net:
        """Return a model that differs on each rank: `Net(seed)` on the main process.

        Preparing makes all of them that one.
        """
        apart = accelerator.process_index
        return Net(seed + apart)

    def ready(self, accelerator: Accelerator, *more: Any) -> Any:
        """Return a prepared `Net` and SGD, and whatever more is given, prepared with them."""
        model = self.net(accelerator)
        optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
        return accelerator.prepare(model, optimizer, *more)

    def batches(self, accelerator: Accelerator, count: int) -> tuple[list[Batch], list[Batch]]:
        """Return this rank's batches, and the whole ones of all ranks together."""
        index, parts = accelerator.hooks.data_shard(accelerator)
        generator = torch.Generator().manual_seed(5)
        mine, whole = [], []
        for _ in range(count):
            x = torch.randn(BATCH * parts, 6, generator=generator)
            y = x.sum(1, keepdim=True) + 0.3
            whole.append((x, y))
            part = slice(index * BATCH, (index + 1) * BATCH)
            mine.append((x[part].to(accelerator.device), y[part].to(accelerator.device)))
        return mine, whole

    def train(
        self, accelerator: Accelerator, model: Any, optimizer: Any, batches: Iterable[Any]
    ) -> list[float]:
        """Train; return the mean loss over the ranks of each batch."""
        losses = []
        for batch in batches:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                losses.append(float(accelerator.reduce(loss.detach(), "mean")))
                optimizer.step()
                optimizer.zero_grad()
        return losses

    def same_everywhere(self, accelerator: Accelerator, model: Any, what: str) -> None:
        """Check that the ranks compute the same from the same samples."""
        generator = torch.Generator().manual_seed(8)
        x = torch.randn(BATCH, 6, generator=generator).to(accelerator.device)
        with torch.no_grad():
            told = model(x).float().cpu().flatten().tolist()
        self.alike(accelerator, [round(value, 4) for value in told], f"outputs of {what}")

    def weights(self, accelerator: Accelerator, model: Any) -> dict[str, torch.Tensor]:
        """Return the whole state dict of the main process, on every rank."""
        state = accelerator.get_state_dict(model)
        held = {key: value.detach().cpu().clone() for key, value in state.items()}
        sent = accelerator.communicator.broadcast_object(held, 0)
        return dict(sent)

    @contextmanager
    def held_threads(self) -> Iterator[None]:
        """Let no thread that is started in the block work before its end.

        So whatever a plugin does beside the training comes after the training in the block. Where
        the block itself waits for a thread, that one begins after some seconds all the same.
        """
        ended, run = threading.Event(), threading.Thread.run

        def later(thread: threading.Thread) -> None:
            ended.wait(_HELD)
            run(thread)

        threading.Thread.run = later  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            threading.Thread.run = run  # type: ignore[method-assign]
            ended.set()

    def scratch(self, name: str) -> Path:
        """Return a path in the folder all ranks share."""
        return self.folder / name

    # --- saying what is wrong -------------------------------------------------------------------

    def skip(self, why: str) -> None:
        """Leave the check: it does not apply."""
        raise Skip(why)

    def equal(self, got: object, expected: object, what: str) -> None:
        """Fail unless two plain values are equal."""
        if got != expected:
            raise AssertionError(f"{what}: {got!r} instead of {expected!r}")

    def close(self, got: Any, expected: Any, what: str, tolerance: float = 1e-5) -> None:
        """Fail unless numbers, tensors, lists or dicts of them differ by at most `tolerance`."""
        for where, one, other in _pairs(got, expected, what):
            one, other = torch.as_tensor(one).float().cpu(), torch.as_tensor(other).float().cpu()
            if one.shape != other.shape:
                raise AssertionError(
                    f"{where}: shape {list(one.shape)} instead of {list(other.shape)}"
                )
            error = float((one - other).abs().max()) if one.numel() else 0.0
            if not error <= tolerance:
                shown = (
                    f": {one.item():.6g} instead of {other.item():.6g}" if one.numel() == 1 else ""
                )
                raise AssertionError(f"{where}: off by {error:.3g} (> {tolerance:g}){shown}")

    def alike(self, accelerator: Accelerator, value: Any, what: str) -> None:
        """Fail unless a plain value is the same on all ranks."""
        seen = accelerator.communicator.gather_object(value)
        if any(one != seen[0] for one in seen):
            raise AssertionError(f"{what}: differs between ranks, {seen}")


def _pairs(got: Any, expected: Any, what: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(expected, Mapping):
        if set(got) != set(expected):
            raise AssertionError(f"{what}: keys {sorted(got)} instead of {sorted(expected)}")
        for key in expected:
            yield from _pairs(got[key], expected[key], f"{what}, {key}")
    elif isinstance(expected, list | tuple):
        if len(got) != len(expected):
            raise AssertionError(f"{what}: {len(got)} entries instead of {len(expected)}")
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            yield from _pairs(one, other, f"{what}[{index}]")
    else:
        yield what, got, expected
