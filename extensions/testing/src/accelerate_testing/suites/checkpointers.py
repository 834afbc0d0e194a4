"""What a checkpointer keeps: a state comes back as it was, a checkpoint is whole or not there."""

from __future__ import annotations

import copy
import importlib
import random
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_checkpoint import load_weights
from accelerate_core.errors import CheckpointError, ConfigurationError
from accelerate_core.plugins.discovery import find
from accelerate_core.utils import ProjectConfiguration
from accelerate_testing.checks import check
from accelerate_testing.lab import BATCH, Lab, loss_of
from accelerate_testing.suites.ending import gained, held_now
from accelerate_testing.suites.precisions import some_backend

#: Micro-batches of the run; two make a step, so an odd number is inside of a cycle.
BATCHES, STOPPED_AFTER = 12, 10
#: Seconds in which what was told to end may do so.
_GRACE = 2.0


class Count:
    """A registered object; it may fail to tell its state."""

    def __init__(self) -> None:
        self.seen, self.trouble = 0, ""

    def state_dict(self) -> dict[str, int]:
        if self.trouble:
            raise OSError(self.trouble)
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Training:
    """All a run has: dropout, shuffling, accumulation, Adam, a schedule, an object of its own."""

    def __init__(self, lab: Lab, seed: int = 0, **arguments: Any) -> None:
        self.lab = lab
        self.accelerator = lab.accelerator(gradient_accumulation_steps=2, **arguments)
        torch.manual_seed(11 + seed)
        net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.25), nn.LayerNorm(8), nn.Linear(8, 1))
        # No running statistics: where a backend leaves these to each rank, no checkpoint has them.
        net.register_buffer("seed", torch.full((1,), float(seed)))
        adam = torch.optim.AdamW(net.parameters(), 0.02)
        decay = torch.optim.lr_scheduler.StepLR(adam, 1, 0.9)
        x = torch.randn(BATCHES * BATCH * lab.size, 6, generator=torch.Generator().manual_seed(9))
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), BATCH, shuffle=True)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            net, adam, decay, loader
        )
        self.batches: Iterator[Any] | None = None
        self.done = 0
        self.count = Count()
        self.accelerator.register_for_checkpointing(self.count)

    def train(self, until: int) -> None:
        """Train until so many batches of the epoch were seen, in one loop over the loader."""
        if self.batches is None:
            self.batches = iter(self.loader)
        while self.done < until:
            batch = next(self.batches)
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(loss_of(self.model, batch))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.count.seen += 1
            self.done += 1

    def load(self, target: str | None = None, **how: Any) -> str:
        """Load, and begin the loop anew."""
        loaded = self.accelerator.load_state(target, **how)
        self.batches, self.done = None, int(self.loader.state_dict()["batches_seen"])
        return loaded

    def told(self) -> dict[str, Any]:
        """Return a copy of all that has to be as in the run that was not stopped."""
        accelerator = self.accelerator
        inner = accelerator.unwrap_model(self.model)
        state = accelerator.hooks.optimizer_state(accelerator, self.optimizer.optimizer)
        random_state = random.getstate()
        with torch.random.fork_rng(devices=[]):
            drawn = float(torch.rand(())), random.random()
        random.setstate(random_state)
        told = {
            "weights and buffers": dict(inner.state_dict()),
            "state of the optimizer": state,
            "learning rate": self.scheduler.get_last_lr(),
            "registered object": self.count.seen,
            "step": accelerator.step,
            "random numbers": drawn,
        }
        return copy.deepcopy(told)

    def is_as(self, expected: Any, what: str) -> None:
        """Fail on every rank unless the run is, on each of them, what `told` said before."""
        wrong = ""
        try:
            _same(self.lab, self.told(), expected, what)
        except AssertionError as error:
            wrong = str(error)
        _agree(self, wrong)


def _agree(run: Training, wrong: str) -> None:
    """Fail on every rank with what is wrong on any of them: none waits for one that gave up."""
    told = dict.fromkeys(filter(None, run.accelerator.communicator.gather_object(wrong)))
    if told:
        raise AssertionError("; ".join(told))


def _same(lab: Lab, got: Any, expected: Any, what: str) -> None:
    """Fail unless two states are equal bit for bit."""
    if isinstance(expected, torch.Tensor):
        # Of what is sharded this rank's part: comparing the whole would be a collective.
        one, other = (t.to_local() if hasattr(t, "to_local") else t for t in (got, expected))
        if not (isinstance(one, torch.Tensor) and torch.equal(one.cpu(), other.cpu())):
            raise AssertionError(f"{what}: not equal bit for bit")
    elif isinstance(expected, dict):
        lab.equal(sorted(map(str, got)), sorted(map(str, expected)), f"keys of {what}")
        for key, value in expected.items():
            _same(lab, got[key], value, f"{what}, {key}")
    elif isinstance(expected, list | tuple):
        lab.equal(len(got), len(expected), f"length of {what}")
        for index, value in enumerate(expected):
            _same(lab, got[index], value, f"{what}[{index}]")
    else:
        lab.equal(got, expected, what)


def _target(lab: Lab, name: str) -> str:
    """Return where a checkpoint is to go."""
    text = str(lab.options.get("target", "{path}"))
    return text.format(path=lab.scratch(name), name=f"{lab.folder.name}/{name}")


def _refused(run: Training, target: str, why: str) -> None:
    """Loading is refused on every rank by a CheckpointError that names the checkpoint."""
    name, wrong = target.rstrip("/").rpartition("/")[2], f"load_state took a checkpoint {why}"
    try:
        run.load(target)
    except CheckpointError as error:
        wrong = "" if name in str(error) else f"the error does not name {name}: {error}"
    _agree(run, wrong)


# --- what was saved is what is loaded -------------------------------------------------------------


def _resumes(lab: Lab) -> None:
    for saved_after in (4, 5):
        where = "between two steps" if saved_after == 4 else "inside of a cycle"
        target = _target(lab, f"resume_{saved_after}")
        run = Training(lab)
        run.train(saved_after)
        run.accelerator.save_state(target)
        run.train(STOPPED_AFTER)
        expected = run.told()
        lab.end()
        again = Training(lab, seed=5)
        again.train(1)
        again.load(target)
        again.train(STOPPED_AFTER)
        again.is_as(expected, f"resumed {where}")
        lab.end()


@check("checkpointer", place="alone")
def resume(lab: Lab) -> str | None:
    """A new run that loads goes on bit for bit: weights, optimizer, schedule, objects, RNG, data."""
    _resumes(lab)
    return "between two steps, and inside of a cycle"


@check("checkpointer")
def resume_on_ranks(lab: Lab) -> str | None:
    """Ranks that load go on bit for bit, each with its own random numbers and position."""
    some_backend()
    _resumes(lab)
    return None


@check("checkpointer", place="alone")
def overwriting(lab: Lab) -> str | None:
    """A second save to the same target replaces the first, and what stood there is not mixed in."""
    run, target = Training(lab), _target(lab, "overwriting")
    for until in (2, 4):
        run.train(until)
        run.accelerator.save_state(target)
    expected = run.told()
    run.train(8)
    run.load(target)
    run.is_as(expected, "the second save")
    return None


@check("checkpointer", place="alone")
def models(lab: Lab) -> str | None:
    """`save_model` writes weights that can be read, in shards too; `save` writes an object."""
    run = Training(lab)
    inner = run.accelerator.unwrap_model(run.model)
    for name, how in (
        ("whole", {}),
        ("shards", {"max_shard_size": "100B"}),
        ("torch", {"safe_serialization": False}),
    ):
        folder = lab.scratch(f"model_{name}")
        run.accelerator.save_model(run.model, folder, **how)
        _same(lab, load_weights(folder, inner), dict(inner.state_dict()), f"save_model, {name}")
    run.accelerator.save({"a": torch.arange(3)}, lab.scratch("object.bin"))
    held = torch.load(lab.scratch("object.bin"), weights_only=True)
    _same(lab, held, {"a": torch.arange(3)}, "what save wrote")
    return None


# --- whole or not at all --------------------------------------------------------------------------


def _fails(lab: Lab) -> None:
    run, target = Training(lab), _target(lab, "fails")
    trouble = "nothing left to write on"
    for blocking in (True, False):
        run.accelerator.save_state(target)
        before, count = run.told(), run.count
        run.train(4 if blocking else 6)
        if run.accelerator.process_index == lab.size - 1:
            count.trouble = trouble
        for place in (target, _target(lab, f"absent_{blocking}")):
            wrong = "a save ended well, although a rank could not save"
            try:
                run.accelerator.save_state(place, blocking=blocking)
                run.accelerator.wait_for_checkpoint()
            except CheckpointError as error:
                wrong = "" if trouble in str(error) else f"the reason is not told: {error}"
            _agree(run, wrong)
            if place != target:
                _refused(run, place, "that was never completed")
        count.trouble = wrong = ""
        try:
            run.load(target)
        except CheckpointError as error:
            wrong = f"the earlier checkpoint does not load after a save that failed: {error}"
        _agree(run, wrong)
        run.is_as(before, "the earlier checkpoint, after a save that failed")
    run.train(8)
    run.accelerator.save_state(target)


@check("checkpointer", place="alone")
def failing(lab: Lab) -> str | None:
    """A save that fails half way is an error, leaves no checkpoint, and the earlier one loads."""
    _fails(lab)
    return None


@check("checkpointer")
def failing_on_a_rank(lab: Lab) -> str | None:
    """What one rank cannot save is an error on every rank, and the earlier checkpoint loads."""
    some_backend()
    _fails(lab)
    return None


def _damages(lab: Lab, target: str) -> Iterator[str]:
    """Damage a checkpoint in one way after another, repairing it in between; tell what was done."""
    named = lab.options.get("damage")
    if named is not None:
        module, _, function = str(named).partition(":")
        yield from getattr(importlib.import_module(module), function)(target)
        return
    paths = [path for path in sorted(Path(target).rglob("*")) if path.is_file()]
    for path in paths:
        whole, beside = path.read_bytes(), path.with_name(f"{path.name}.beside")
        path.rename(beside)
        yield f"without {path.name}"
        middle = len(whole) // 2
        path.write_bytes(whole[:middle])
        yield f"with half of {path.name}"
        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        yield f"with another byte in {path.name}"
        path.unlink()
        beside.rename(path)
    if not paths:
        lab.skip(f"nothing is at {target}; options have no 'damage', a function of a target")


@check("checkpointer", place="alone")
def damaged(lab: Lab) -> str | None:
    """What is missing, cut off or changed is refused by name, and nothing is changed by it."""
    run, target = Training(lab), _target(lab, "damaged")
    run.train(3)
    run.accelerator.save_state(target)
    run.train(4)
    before, tried = run.told(), 0
    for what in _damages(lab, target):
        _refused(run, target, what)
        run.is_as(before, f"the run, after a checkpoint {what} was refused")
        tried += 1
    run.load(target)
    lab.equal(tried > 0, True, "the checkpoint was damaged in some way")
    return f"{tried} ways"


@check("checkpointer")
def damaged_on_ranks(lab: Lab) -> str | None:
    """What is damaged is refused on every rank, also if one rank alone would read it."""
    some_backend()
    run, target = Training(lab), _target(lab, "damaged_ranks")
    run.train(3)
    run.accelerator.save_state(target)
    damages = _damages(lab, target) if lab.rank == 0 else None
    tried = 0
    while True:
        what = None if damages is None else next(damages, None)
        what = run.accelerator.communicator.broadcast_object(what)
        if what is None:
            break
        _refused(run, target, what)
        tried += 1
    run.load(target)
    return f"{tried} ways"


@check("checkpointer", place="alone")
def blame(lab: Lab) -> str | None:
    """A target where nothing is is refused by name, and the error names the checkpointer."""
    run = Training(lab)
    label = find(lab.kind, lab.name, because="plugins check").label
    try:
        run.load(_target(lab, "never_saved"))
    except CheckpointError as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        lab.equal("never_saved" in str(error), True, f"the target is named: {error}")
        lab.equal(label in notes, True, f"{label} is named in the notes: {notes}")
    else:
        raise AssertionError("load_state took a target where nothing is")
    return None


class _Loaded:
    """Tells when it is unpickled."""

    happened = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, ()


def _unpickled() -> _Loaded:
    _Loaded.happened = True
    return _Loaded()


@check("checkpointer", place="alone")
def pickles(lab: Lab) -> str | None:
    """Python objects in a state are not unpickled, unless the script says `trust=True`."""
    run, target = Training(lab), _target(lab, "pickles")
    run.count.seen = _Loaded()  # type: ignore[assignment]
    try:
        run.accelerator.save_state(target)
    except CheckpointError as error:
        return f"not saved: {error}"
    _Loaded.happened = False
    _refused(run, target, "with a Python object in it")
    lab.equal(_Loaded.happened, False, "a Python object was unpickled")
    run.load(target, trust=True)
    lab.equal(_Loaded.happened, True, "a Python object was unpickled, with trust=True")
    return None


# --- beside the training --------------------------------------------------------------------------


def _saves_beside(lab: Lab) -> None:
    run, target = Training(lab), _target(lab, "beside")
    run.train(4)
    with lab.held_threads():
        run.accelerator.save_state(target, blocking=False)
        run.train(STOPPED_AFTER)
        expected = run.told()
    run.accelerator.wait_for_checkpoint()
    lab.end()
    run = Training(lab, seed=3)
    run.load(target)
    run.train(STOPPED_AFTER)
    run.is_as(expected, "resumed from what was saved beside the training")


@check("checkpointer", place="alone")
def beside_training(lab: Lab) -> str | None:
    """`blocking=False` keeps the state of the call, whatever training does meanwhile."""
    _saves_beside(lab)
    return None


@check("checkpointer")
def beside_training_on_ranks(lab: Lab) -> str | None:
    """`blocking=False` keeps the state of the call on every rank."""
    some_backend()
    _saves_beside(lab)
    return None


# --- names and numbers ----------------------------------------------------------------------------


@check("checkpointer", place="alone")
def naming(lab: Lab) -> str | None:
    """Automatic names and `total_limit` work, or are refused when the Accelerator is made."""

    def training() -> Training:
        project = ProjectConfiguration(
            str(lab.scratch("naming")), automatic_checkpoint_naming=True, total_limit=2
        )
        return Training(lab, project_config=project)

    try:
        run = training()
    except ConfigurationError as error:
        return f"refused: {error}"
    saved = []
    for until in (2, 4, 6):
        run.train(until)
        saved.append(run.accelerator.save_state())
    expected = run.told()
    lab.equal(len(set(saved)), 3, f"names of three saves, {saved}")
    _refused(run, saved[0], "that total_limit=2 has no room for")
    run.load(saved[1])
    lab.end()
    run = training()
    lab.equal(run.load(), saved[2], "the newest checkpoint")
    run.is_as(expected, "the newest checkpoint")
    lab.equal(run.accelerator.save_state() in saved, False, "the next name is one of the earlier")
    return None


# --- the end --------------------------------------------------------------------------------------


@contextmanager
def _temporary(lab: Lab) -> Iterator[Path]:
    """Let temporary files go to a directory of their own."""
    folder, before = lab.scratch("temporary"), tempfile.tempdir
    folder.mkdir(exist_ok=True)
    tempfile.tempdir = str(folder)
    try:
        yield folder
    finally:
        tempfile.tempdir = before


@check("checkpointer", place="alone")
def ending(lab: Lab) -> str | None:
    """After `free_memory`, `end_training` or an error no thread, process or file is left."""
    told = []
    with _temporary(lab) as folder, warnings.catch_warnings():
        for turn in range(3):
            run = Training(lab)
            for blocking in (True, False):
                run.accelerator.save_state(_target(lab, "ending"), blocking=blocking)
            if turn == 0:
                run.accelerator.free_memory()
            if turn < 2:
                run.accelerator.end_training()
            else:
                _raises(run.accelerator)
            run.accelerator.end_training()
            lab.end()
            told.append(held_now())
        until = time.monotonic() + _GRACE
        while (left := gained(told[0], held_now())) and time.monotonic() < until:
            time.sleep(0.05)
        left = left or ", ".join(str(path) for path in folder.rglob("*"))
    if left:
        raise AssertionError(f"left of an Accelerator that has ended: {left}")
    return None


def _raises(accelerator: Any) -> None:
    """Let the script's own error end the run."""
    try:
        with accelerator:
            raise KeyError("of the script")
    except KeyError as error:
        if error.args != ("of the script",):
            raise AssertionError(f"the exception of the script became {error!r}") from error
