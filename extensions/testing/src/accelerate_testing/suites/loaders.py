"""What a loader factory must do: read every sample once, in a reproducible order, and resume exactly."""

from __future__ import annotations

import io
import pkgutil
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from accelerate_core.plugin import Accelerator
from accelerate_testing.checks import check
from accelerate_testing.context import CheckContext
from accelerate_testing.suites.leaving import Lives

#: Samples per batch and per epoch; an epoch is a multiple of neither one nor two batches.
BATCH, SAMPLES = 4, 26
EVERY = list(range(SAMPLES))
Ids = list[list[int]]


class LoaderCase:
    """One Accelerator and one prepared loader with `SAMPLES` numbers."""

    def __init__(
        self, ctx: CheckContext, *, shuffle: bool = False, drop_last: bool = False, **arguments: Any
    ) -> None:
        if "make" not in ctx.options:
            ctx.skip("the option 'make', a function module:name that returns a loader, is not set")
        make = pkgutil.resolve_name(str(ctx.options["make"]))
        self.accelerator: Accelerator = ctx.accelerator(**arguments)
        folder = ctx.scratch("samples")
        for turn in (True, False):  # the main process may write data that the others read
            if self.accelerator.is_main_process is turn:
                self.given = make(folder, SAMPLES, BATCH, shuffle, drop_last)
            self.accelerator.wait_for_everyone()
        self.loader: Any = self.accelerator.prepare(self.given)
        of_core = self.loader.__class__.__module__.startswith("accelerate_core.")
        left = of_core and isinstance(self.loader, DataLoader)
        assert not left, f"make_loader of {ctx.name} returned None for the loader of 'make'"

    def epoch(self) -> Ids:
        """Return the samples of each of this rank's batches."""
        return [ids_of(batch) for batch in self.loader]

    def epoch_of_ranks(self) -> list[Ids]:
        """Return the samples of each batch of every rank."""
        return list(self.accelerator.communicator.gather_object(self.epoch()))


def ids_of(batch: Any) -> list[int]:
    """Return the numbers of the samples in a batch."""
    ids: list[int] = batch["id"].flatten().tolist()
    return ids


def _saved(loader: Any) -> Any:
    """Return a loader's position after writing it to a file that only holds plain data."""
    buffer = io.BytesIO()
    torch.save(loader.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def _flat(batches: Ids) -> list[int]:
    return list(chain.from_iterable(batches))


@check("loaders", alone=True)
def every_sample(ctx: CheckContext) -> None:
    """One process reads every sample once, in order, and knows which batch is the last."""
    reading = LoaderCase(ctx)
    for _ in range(2):
        ends, got = [], []
        for batch in reading.loader:
            got.append(ids_of(batch))
            ends.append(reading.accelerator.gradient_state.end_of_dataloader)
        ctx.equal(_flat(got), EVERY, "samples of an epoch")
        ctx.equal(ends, [False] * (len(got) - 1) + [True], "end_of_dataloader at each batch")
        ctx.equal(len(reading.loader), len(got), "len of the loader")
    ctx.equal(reading.loader.iteration, 2, "iteration after two epochs")
    ctx.end()
    dropping = LoaderCase(ctx, drop_last=True)
    ctx.equal(_flat(dropping.epoch()), EVERY[:24], "samples with drop_last=True")


@check("loaders")
def every_sample_on_ranks(ctx: CheckContext) -> None:
    """The ranks read every sample and equally many batches; only padding at the end repeats samples."""
    for shuffle in (False, True):
        reading = LoaderCase(ctx, shuffle=shuffle)
        ranks = reading.epoch_of_ranks()
        ctx.equal(len({len(batches) for batches in ranks}), 1, "numbers of batches on the ranks")
        ctx.equal(len(reading.loader), len(ranks[ctx.rank]), "len of the loader")
        sizes = {len(batch) for batches in ranks for batch in batches}
        ctx.equal(sizes, {BATCH}, "sizes of batches")
        together = sorted({number for batches in ranks for number in _flat(batches)})
        ctx.equal(together, EVERY, "samples of all ranks together")
        whole = [number for batches in ranks for number in _flat(batches[:-1])]
        ctx.equal(len({*whole}), len(whole), "different samples before the end")
        ctx.end()


@check("loaders")
def uneven(ctx: CheckContext) -> None:
    """With even_batches=False there is no padding, and with drop_last=True the end is left out."""
    reading = LoaderCase(ctx)
    reading.loader.even_batches = False
    together = [number for batches in reading.epoch_of_ranks() for number in _flat(batches)]
    ctx.equal(sorted(together), EVERY, "samples without padding")
    ctx.end()
    reading = LoaderCase(ctx, drop_last=True)
    together = [number for batches in reading.epoch_of_ranks() for number in _flat(batches)]
    wanted = SAMPLES // (BATCH * ctx.size) * BATCH * ctx.size
    ctx.equal(len(together), wanted, "samples with drop_last=True")
    ctx.equal(len({*together}), wanted, "different samples with drop_last=True")


@check(
    "loaders", alone=True,
    on_ranks="`gather_for_metrics` returns every sample once, without padding.",
)  # fmt: skip
def metrics(ctx: CheckContext) -> None:
    """`gather_for_metrics` returns every sample once."""
    for shuffle in (False, True):
        reading = LoaderCase(ctx, shuffle=shuffle)
        gather = reading.accelerator.gather_for_metrics
        for _ in range(2):
            seen = _flat([gather(batch["id"]).flatten().tolist() for batch in reading.loader])
            ctx.equal(sorted(seen), EVERY, "samples of gather_for_metrics")
        ctx.end()


@check("loaders", alone=True)
def order(ctx: CheckContext) -> None:
    """The shuffled order depends on the epoch, and `set_epoch` reproduces it, even in a different run."""
    reading = LoaderCase(ctx, shuffle=True)
    epochs = []
    for epoch in range(3):
        reading.loader.set_epoch(epoch)
        epochs.append(_flat(reading.epoch()))
    for epoch, numbers in enumerate(epochs):
        ctx.equal(sorted(numbers), EVERY, f"samples of epoch {epoch}")
    orders = {tuple(numbers) for numbers in epochs}
    assert len(orders) == 3, "two epochs of a shuffled loader have the same order"
    reading.loader.set_epoch(1)
    torch.rand(7)
    ctx.equal(_flat(reading.epoch()), epochs[1], "epoch 1, read again")
    ctx.end()
    other = LoaderCase(ctx, shuffle=True)
    again = [_flat(other.epoch()) for _ in range(3)]
    ctx.equal(again, epochs, "the first epochs of another loader")


@check("loaders", alone=True)
def abandoned(ctx: CheckContext) -> None:
    """After `break`, the next loop starts the epoch again."""
    reading = LoaderCase(ctx, shuffle=True)
    first = [ids_of(batch) for batch in islice(reading.loader, 3)]
    for batch in reading.loader:
        ctx.equal(ids_of(batch), first[0], "the first batch after break")
        break
    del batch
    ctx.equal(reading.accelerator.gradient_state.in_dataloader, False, "in_dataloader, after break")
    whole = reading.epoch()
    ctx.equal(whole[:3], first, "the epoch after break")
    ctx.equal(len(_flat(whole)), SAMPLES, "samples of that epoch")


@check("loaders", alone=True)
def skipping(ctx: CheckContext) -> None:
    """`skip_first_batches` skips the first batches of the epoch, and nothing else."""
    reading = LoaderCase(ctx)
    whole = reading.epoch()
    part = reading.accelerator.skip_first_batches(reading.loader, 2)
    ctx.equal([ids_of(batch) for batch in part], whole[2:], "batches after the first two")
    ctx.equal(len(part), len(whole) - 2, "len of the rest")
    ctx.equal(reading.epoch(), whole, "the loader itself afterwards")


def _rest(loader: Any, state: Any) -> Ids:
    loader.load_state_dict(state)
    return [ids_of(batch) for batch in loader]


@check(
    "loaders", alone=True, on_ranks="Every rank continues with the batches that it would have read."
)
def resume(ctx: CheckContext) -> str:
    """A position saved at any time continues with the batches of the uninterrupted run."""
    reading = LoaderCase(ctx, shuffle=True)
    reading.epoch()
    saved, batches = [_saved(reading.loader)], []
    for batch in reading.loader:
        batches.append(ids_of(batch))
        saved.append(_saved(reading.loader))
    between = _saved(reading.loader)
    following = reading.epoch()
    ctx.end()
    for number, state in enumerate(saved):
        again = LoaderCase(ctx, shuffle=True)
        torch.rand(3 + ctx.rank)
        where = f"after batch {number} of {len(batches)}"
        ctx.equal(_rest(again.loader, state), batches[number:], f"the rest after resuming {where}")
        ctx.equal(again.epoch(), following, f"the epoch after one resumed {where}")
        ctx.end()
    again = LoaderCase(ctx, shuffle=True)
    again.epoch()
    ctx.equal(_rest(again.loader, between), following, "the epoch resumed before it started")
    return f"{len(saved)} positions"


@check("loaders", alone=True)
def resume_twice(ctx: CheckContext) -> None:
    """A resumed run that is interrupted again continues from there."""
    reading = LoaderCase(ctx, shuffle=True)
    whole = reading.epoch()
    ctx.end()
    seen: Ids = []
    state = None
    for count in (2, 3, len(whole)):
        again = LoaderCase(ctx, shuffle=True)
        if state is not None:
            again.loader.load_state_dict(state)
        for batch in islice(again.loader, count):
            seen.append(ids_of(batch))
            state = _saved(again.loader)
        ctx.end()
    ctx.equal(seen, whole, "batches of an epoch that was interrupted twice")


@check("loaders", alone=True)
def accumulation(ctx: CheckContext) -> None:
    """The last batch of an epoch ends an accumulation cycle."""
    reading = LoaderCase(ctx, gradient_accumulation_steps=3)
    model = torch.nn.Linear(2, 1)
    accelerator = reading.accelerator
    steps = []
    model = accelerator.prepare(model)
    for _ in reading.loader:
        with accelerator.accumulate(model):
            steps.append(accelerator.sync_gradients)
    wanted = [(index + 1) % 3 == 0 for index in range(len(steps) - 1)] + [True]
    ctx.equal(steps, wanted, "sync_gradients at each batch")
    ctx.equal(accelerator.gradient_state.in_dataloader, False, "in_dataloader after the loop")


@check("loaders", alone=True)
def slots(ctx: CheckContext) -> None:
    """`loop_body_end` is called after each run of the loop's body."""
    reading = LoaderCase(ctx)
    calls = list[str]()
    state = reading.accelerator.gradient_state
    state.loop_body_end = lambda: calls.append("end")
    for _ in reading.loader:
        calls.append("body")
    wanted = ["body", "end"] * len(reading.loader)
    ctx.equal(calls, wanted, "calls after the loop's body")


def _watched(feed: Any, fed: list[int], batches: Any, non_blocking: bool) -> Iterator[Any]:
    for batch in feed(batches, non_blocking):
        fed.append(len(batch["id"]))
        yield batch


@check("loaders", alone=True)
def placing(ctx: CheckContext) -> None:
    """Batches pass through the backend's `feed_device`, unless device_placement is False."""
    for place in (True, False):
        reading = LoaderCase(ctx, device_placement=place)
        accelerator = reading.accelerator
        fed = list[int]()
        feed = accelerator.hooks.feed_device

        object.__setattr__(accelerator.hooks, "feed_device", partial(_watched, feed, fed))
        count = len(list(reading.loader))
        assert len(fed) == (count if place else 0), (
            f"{len(fed)} of {count} batches passed through the backend's feed_device, with "
            f"device_placement={place}"
        )
        ctx.end()


@check("loaders", alone=True)
def ending(ctx: CheckContext) -> None:
    """After `end_training` no thread, process or file is left, even after an unfinished loop."""
    lives = Lives(ctx)
    for _ in range(3):
        with lives.one():
            reading = LoaderCase(ctx)
            reading.epoch()
            for batch in reading.loader:
                ctx.equal(len(ids_of(batch)), BATCH, "samples of a batch")
                break
            reading.accelerator.end_training()
            del reading
    lives.check()


@check("loaders", alone=True)
def others(ctx: CheckContext) -> None:
    """An ordinary loader of numbers still returns them."""
    accelerator = ctx.accelerator()
    numbers: Any = range(10)
    loader = accelerator.prepare(DataLoader(numbers, batch_size=4))
    ctx.equal([batch.tolist() for batch in loader], [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]], "batches")
