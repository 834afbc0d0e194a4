"""What a maker of loaders keeps: every sample once, the same order again, no batch twice."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from accelerate_core.accelerator import Accelerator
from accelerate_testing.checks import Skip, check
from accelerate_testing.lab import Lab
from accelerate_testing.suites.precisions import some_backend

#: Samples per batch of a rank, and of an epoch: neither a multiple of one nor of two batches.
BATCH, SAMPLES = 4, 26
Ids = list[list[int]]


class Reading:
    """One Accelerator and one prepared loader of `SAMPLES` numbers."""

    def __init__(
        self, lab: Lab, *, shuffle: bool = False, drop_last: bool = False, **arguments: Any
    ) -> None:
        if "make" not in lab.options:
            raise Skip("options say no 'make', a function module:name that returns a loader")
        module, _, name = str(lab.options["make"]).partition(":")
        make = getattr(importlib.import_module(module), name)
        self.lab = lab
        self.accelerator: Accelerator = lab.accelerator(**arguments)
        folder = lab.scratch("samples")
        for turn in (True, False):  # the main process writes what the others read
            if self.accelerator.is_main_process is turn:
                self.given = make(folder, SAMPLES, BATCH, shuffle, drop_last)
            self.accelerator.wait_for_everyone()
        self.loader: Any = self.accelerator.prepare(self.given)
        if isinstance(self.loader, DataLoader) and self.loader.__class__.__module__.startswith(
            "accelerate_core."
        ):
            raise AssertionError(f"{lab.name} left the loader that 'make' returned to the core")

    def epoch(self) -> Ids:
        """Return the samples of this rank's batches."""
        return [ids_of(batch) for batch in self.loader]

    def ranks(self, value: Any) -> list[Any]:
        """Return what every rank has."""
        return list(self.accelerator.communicator.gather_object(value))

    def real(self) -> list[int]:
        """Return the samples of an epoch as metrics see them."""
        seen: list[int] = []
        for batch in self.loader:
            seen += self.accelerator.gather_for_metrics(batch["id"]).flatten().tolist()
        return seen


def ids_of(batch: Any) -> list[int]:
    """Return the numbers of a batch's samples; what goes with them has to be theirs."""
    ids: list[int] = batch["id"].flatten().tolist()
    return ids


def _saved(loader: Any) -> Any:
    """Return a loader's position, through a file that holds plain data only."""
    buffer = io.BytesIO()
    torch.save(loader.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def _flat(batches: Ids) -> list[int]:
    return [number for batch in batches for number in batch]


# --- every sample ---------------------------------------------------------------------------------


@check("loaders", place="alone")
def every_sample(lab: Lab) -> str | None:
    """One process reads every sample once, in order, and knows where the data ends."""
    reading = Reading(lab)
    for _ in range(2):
        ends, got = [], []
        for batch in reading.loader:
            got.append(ids_of(batch))
            ends.append(reading.accelerator.gradient_state.end_of_dataloader)
        lab.equal(_flat(got), list(range(SAMPLES)), "samples of an epoch")
        lab.equal(ends, [False] * (len(got) - 1) + [True], "end_of_dataloader at each batch")
        lab.equal(len(reading.loader), len(got), "len of the loader")
    lab.equal(reading.loader.iteration, 2, "iteration after two epochs")
    lab.end()
    dropping = Reading(lab, drop_last=True)
    lab.equal(_flat(dropping.epoch()), list(range(24)), "samples with drop_last=True")
    return None


@check("loaders")
def every_sample_on_ranks(lab: Lab) -> str | None:
    """The ranks read every sample, none twice but to fill the end up, and equally many batches."""
    some_backend()
    for shuffle in (False, True):
        reading = Reading(lab, shuffle=shuffle)
        ranks = reading.ranks(reading.epoch())
        lab.equal(len({len(batches) for batches in ranks}), 1, "numbers of batches on the ranks")
        lab.equal(len(reading.loader), len(ranks[lab.rank]), "len of the loader")
        lab.equal(
            {len(batch) for batches in ranks for batch in batches}, {BATCH}, "sizes of batches"
        )
        lab.equal(
            sorted({number for batches in ranks for number in _flat(batches)}),
            list(range(SAMPLES)),
            "samples of all ranks together",
        )
        whole = [_flat([batches[step] for batches in ranks]) for step in range(len(ranks[0]) - 1)]
        lab.equal(len(set(_flat(whole))), len(_flat(whole)), "different samples before the end")
        lab.end()
    return None


@check("loaders")
def uneven(lab: Lab) -> str | None:
    """With even_batches=False nothing is filled up, and with drop_last=True the end is left out."""
    some_backend()
    reading = Reading(lab)
    reading.loader.even_batches = False
    together = [number for batches in reading.ranks(reading.epoch()) for number in _flat(batches)]
    lab.equal(sorted(together), list(range(SAMPLES)), "samples without filling up")
    lab.end()
    reading = Reading(lab, drop_last=True)
    together = [number for batches in reading.ranks(reading.epoch()) for number in _flat(batches)]
    wanted = SAMPLES // (BATCH * lab.size) * BATCH * lab.size
    lab.equal(len(together), wanted, "samples with drop_last=True")
    lab.equal(len(set(together)), wanted, "different samples with drop_last=True")
    return None


def _metrics(lab: Lab) -> None:
    for shuffle in (False, True):
        reading = Reading(lab, shuffle=shuffle)
        for _ in range(2):
            lab.equal(sorted(reading.real()), list(range(SAMPLES)), "samples of gather_for_metrics")
        lab.end()


@check("loaders", place="alone")
def metrics(lab: Lab) -> str | None:
    """`gather_for_metrics` gives every sample once."""
    _metrics(lab)
    return None


@check("loaders")
def metrics_on_ranks(lab: Lab) -> str | None:
    """`gather_for_metrics` gives every sample once: what fills the end up is cut off."""
    some_backend()
    _metrics(lab)
    return None


# --- the order ------------------------------------------------------------------------------------


@check("loaders", place="alone")
def order(lab: Lab) -> str | None:
    """A shuffled order changes with the epoch; `set_epoch` brings one back, also in another run."""
    reading = Reading(lab, shuffle=True)
    epochs = []
    for epoch in range(3):
        reading.loader.set_epoch(epoch)
        epochs.append(_flat(reading.epoch()))
    for epoch, numbers in enumerate(epochs):
        lab.equal(sorted(numbers), list(range(SAMPLES)), f"samples of epoch {epoch}")
    if len({tuple(numbers) for numbers in epochs}) < 3:
        raise AssertionError("two epochs of a shuffled loader have the same order")
    reading.loader.set_epoch(1)
    torch.rand(7)
    lab.equal(_flat(reading.epoch()), epochs[1], "epoch 1, read again")
    lab.end()
    other = Reading(lab, shuffle=True)
    lab.equal(
        [_flat(other.epoch()) for _ in range(3)], epochs, "the first epochs of another loader"
    )
    return None


@check("loaders", place="alone")
def abandoned(lab: Lab) -> str | None:
    """A loop that is left has ended; the next one begins the epoch anew."""
    reading = Reading(lab, shuffle=True)
    first = [ids_of(batch) for batch in islice(reading.loader, 3)]
    for batch in reading.loader:
        lab.equal(ids_of(batch), first[0], "the first batch after a loop that was left")
        break
    del batch
    lab.equal(reading.accelerator.gradient_state.in_dataloader, False, "in_dataloader, after break")
    whole = reading.epoch()
    lab.equal(whole[:3], first, "the epoch after loops that were left")
    lab.equal(len(_flat(whole)), SAMPLES, "samples of that epoch")
    return None


@check("loaders", place="alone")
def skipping(lab: Lab) -> str | None:
    """`skip_first_batches` leaves out the first batches of the epoch, and nothing else."""
    reading = Reading(lab)
    whole = reading.epoch()
    part = reading.accelerator.skip_first_batches(reading.loader, 2)
    lab.equal([ids_of(batch) for batch in part], whole[2:], "batches after the first two")
    lab.equal(len(part), len(whole) - 2, "len of what is left")
    lab.equal(reading.epoch(), whole, "the loader itself, afterwards")
    return None


# --- resuming -------------------------------------------------------------------------------------


def _rest(loader: Any, state: Any) -> Ids:
    loader.load_state_dict(state)
    return [ids_of(batch) for batch in loader]


def _resumes(lab: Lab) -> Iterator[str]:
    reading = Reading(lab, shuffle=True)
    reading.epoch()
    saved, batches = [_saved(reading.loader)], []
    for batch in reading.loader:
        batches.append(ids_of(batch))
        saved.append(_saved(reading.loader))
    between, following = _saved(reading.loader), reading.epoch()
    lab.end()
    for number, state in enumerate(saved):
        again = Reading(lab, shuffle=True)
        torch.rand(3 + lab.rank)
        where = f"after batch {number} of {len(batches)}"
        lab.equal(_rest(again.loader, state), batches[number:], f"the rest, resumed {where}")
        lab.equal(again.epoch(), following, f"the epoch after one that was resumed {where}")
        lab.end()
        yield where
    again = Reading(lab, shuffle=True)
    again.epoch()
    lab.equal(_rest(again.loader, between), following, "the epoch, resumed before it began")


@check("loaders", place="alone")
def resume(lab: Lab) -> str | None:
    """A position of any moment goes on with the very batches of the uninterrupted run."""
    return f"{len(list(_resumes(lab)))} moments"


@check("loaders")
def resume_on_ranks(lab: Lab) -> str | None:
    """Every rank goes on with the very batches it would have read."""
    some_backend()
    return f"{len(list(_resumes(lab)))} moments"


@check("loaders", place="alone")
def resume_twice(lab: Lab) -> str | None:
    """A run that was resumed, and is left again, is resumed where it was left."""
    reading = Reading(lab, shuffle=True)
    whole = reading.epoch()
    lab.end()
    seen: Ids = []
    state = None
    for count in (2, 3, len(whole)):
        again = Reading(lab, shuffle=True)
        if state is not None:
            again.loader.load_state_dict(state)
        for batch in islice(again.loader, count):
            seen.append(ids_of(batch))
            state = _saved(again.loader)
        lab.end()
    lab.equal(seen, whole, "batches of an epoch that was interrupted twice")
    return None


# --- the loop around it ---------------------------------------------------------------------------


@check("loaders", place="alone")
def accumulation(lab: Lab) -> str | None:
    """The last batch of the data ends an accumulation cycle."""
    reading = Reading(lab, gradient_accumulation_steps=3)
    model, accelerator, steps = torch.nn.Linear(2, 1), reading.accelerator, []
    model = accelerator.prepare(model)
    for _ in reading.loader:
        with accelerator.accumulate(model):
            steps.append(accelerator.sync_gradients)
    wanted = [(index + 1) % 3 == 0 for index in range(len(steps) - 1)] + [True]
    lab.equal(steps, wanted, "sync_gradients at each batch")
    lab.equal(accelerator.gradient_state.in_dataloader, False, "in_dataloader after the loop")
    return None


@check("loaders", place="alone")
def slots(lab: Lab) -> str | None:
    """Whoever watches the loop is called before each batch is read, and after each body."""
    reading, told = Reading(lab), list[str]()
    state = reading.accelerator.gradient_state
    state.before_cycle = lambda: told.append("before")
    state.loop_body_end = lambda: told.append("end")
    for _ in reading.loader:
        told.append("body")
    wanted = ["before", *["body", "end", "before"] * len(reading.loader)]
    lab.equal(told, wanted, "calls around the loop's body")
    return None


def _watched(
    feed: Any, fed: list[int], accelerator: Any, batches: Any, non_blocking: bool
) -> Iterator[Any]:
    for batch in feed(accelerator, batches, non_blocking):
        fed.append(len(batch["id"]))
        yield batch


@check("loaders", place="alone")
def placing(lab: Lab) -> str | None:
    """Batches come through the backend's `feed_device`, unless they are to stay where they are."""
    for place in (True, False):
        reading = Reading(lab, device_placement=place)
        accelerator, fed = reading.accelerator, list[int]()
        feed = accelerator.hooks.feed_device

        object.__setattr__(accelerator.hooks, "feed_device", partial(_watched, feed, fed))
        count = len(list(reading.loader))
        if len(fed) != (count if place else 0):
            raise AssertionError(
                f"{len(fed)} of {count} batches came through the backend's feed_device, with "
                f"device_placement={place}"
            )
        lab.end()
    return None


@check("loaders", place="alone")
def others(lab: Lab) -> str | None:
    """What it has no better way to read is read as ever: a loader of numbers gives these."""
    accelerator = lab.accelerator()
    loader = accelerator.prepare(DataLoader(range(10), batch_size=4))  # type: ignore[arg-type]
    lab.equal([batch.tolist() for batch in loader], [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]], "batches")
    return None
