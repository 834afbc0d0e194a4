"""What a checkpointer must do: restore the exact state, and never leave an incomplete checkpoint."""

from __future__ import annotations

import copy
import pkgutil
import random
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate_checkpoint import load_weights
from accelerate_core.plugin import CheckpointError, ConfigurationError, find
from accelerate_core.plugins import catalog
from accelerate_core.utils import ProjectConfiguration
from accelerate_testing.checks import check
from accelerate_testing.context import CheckContext, leaves, raised
from accelerate_testing.suites.ending import script_raises
from accelerate_testing.suites.leaving import Lives
from accelerate_testing.training import ResumableTrainer, held_threads


class Count:
    """A registered object, which may fail to return its state."""

    def __init__(self) -> None:
        self.seen, self.trouble = 0, ""

    def state_dict(self) -> dict[str, int]:
        if self.trouble:
            raise OSError(self.trouble)
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def _net(seed: int) -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.25), nn.LayerNorm(8), nn.Linear(8, 1))
    # No running statistics: a backend may leave these to each rank, and then no checkpoint has them.
    net.register_buffer("seed", torch.full((1,), float(seed)))
    return net


class Training(ResumableTrainer):
    """A run with dropout, AdamW and a registered object."""

    def __init__(self, ctx: CheckContext, seed: int = 0, **arguments: Any) -> None:
        adam = partial(torch.optim.AdamW, lr=0.02)
        super().__init__(ctx, 11 + seed, partial(_net, seed), adam, **arguments)
        self.count = Count()
        self.accelerator.register_for_checkpointing(self.count)

    def step(self, loss: torch.Tensor, *metric: float) -> None:
        """Step and count the step."""
        super().step(loss, *metric)
        self.count.seen += 1

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of everything that must equal the state of an uninterrupted run."""
        accelerator = self.accelerator
        inner = accelerator.unwrap_model(self.model)
        state = accelerator.hooks.optimizer_state(self.optimizer.optimizer)
        random_state = random.getstate()
        with torch.random.fork_rng(devices=[]):
            drawn = float(torch.rand(())), random.random()
        random.setstate(random_state)
        state = {
            "weights and buffers": dict(inner.state_dict()),
            "state of the optimizer": state,
            "learning rate": self.scheduler.get_last_lr(),
            "registered object": self.count.seen,
            "step": accelerator.step,
            "random numbers": drawn,
        }
        return copy.deepcopy(state)

    def is_as(self, expected: Any, what: str) -> None:
        """Fail on every rank unless the state of each rank equals an earlier `snapshot`."""
        wrong = raised(AssertionError, lambda: _same(self.snapshot(), expected, what))
        self.fail_together(str(wrong or ""))

    def fail_together(self, wrong: str) -> None:
        """Fail on every rank if anything is wrong on one of them, so that none waits for another."""
        told = dict.fromkeys(filter(None, self.accelerator.communicator.gather_object(wrong)))
        assert not told, "; ".join(told)

    def refuses(self, target: str, why: str) -> None:
        """Fail unless loading raises a CheckpointError on every rank that names the checkpoint."""
        name, wrong = (
            target.rstrip("/").rpartition("/")[2],
            f"load_state accepted a checkpoint {why}",
        )
        told = raised(CheckpointError, lambda: self.load(target))
        if told:
            wrong = "" if name in str(told) else f"the error does not name {name}: {told}"
        self.fail_together(wrong)


def _same(got: Any, expected: Any, what: str) -> None:
    """Fail unless two states have the same bits."""
    for where, one, other in leaves(got, expected, what):
        if not isinstance(other, torch.Tensor):
            assert one == other, f"{where}: {one!r} instead of {other!r}"
            continue
        # Only this rank's part of a sharded tensor: comparing the whole would be a collective.
        one, other = (t.to_local() if hasattr(t, "to_local") else t for t in (one, other))
        equal = isinstance(one, torch.Tensor) and torch.equal(one.cpu(), other.cpu())
        assert equal, f"{where}: the bits differ"


def _target(ctx: CheckContext, name: str) -> str:
    """Return where a checkpoint goes."""
    text = str(ctx.options.get("target", "{path}"))
    return text.format(path=ctx.scratch(name), name=f"{ctx.folder.name}/{name}")


@check(
    "checkpointer", alone=True,
    on_ranks="Ranks continue with the same bits, each with its own random numbers and position.",
)  # fmt: skip
def resume(ctx: CheckContext) -> str:
    """A new run continues with the same bits: weights, optimizer, schedule, objects, generators, data."""
    for saved_after, where in ((4, "between two steps"), (5, "inside a cycle")):
        target = _target(ctx, f"resume_{saved_after}")
        run = Training(ctx)
        run.go_on(saved_after)
        run.accelerator.save_state(target)
        run.go_on(run.END)
        expected = run.snapshot()
        ctx.end()
        again = Training(ctx, seed=5)
        again.go_on(1)
        again.load(target)
        again.go_on(again.END)
        again.is_as(expected, f"resumed {where}")
        ctx.end()
    return "between two steps and inside a cycle"


@check("checkpointer", alone=True)
def overwriting(ctx: CheckContext) -> None:
    """A second save to the same target replaces the first completely."""
    run, target = Training(ctx), _target(ctx, "overwriting")
    for until in (2, 4):
        run.go_on(until)
        run.accelerator.save_state(target)
    expected = run.snapshot()
    run.go_on(8)
    run.load(target)
    run.is_as(expected, "the second save")


@check("checkpointer", alone=True)
def models(ctx: CheckContext) -> None:
    """`save_model` writes readable weights, even in shards, and `save` writes an object."""
    run = Training(ctx)
    inner = run.accelerator.unwrap_model(run.model)
    for name, how in (
        ("whole", {}),
        ("shards", {"max_shard_size": "100B"}),
        ("torch", {"safe_serialization": False}),
    ):
        folder = ctx.scratch(f"model_{name}")
        run.accelerator.save_model(run.model, folder, **how)
        _same(load_weights(folder, inner), dict(inner.state_dict()), f"save_model, {name}")
    run.accelerator.save({"a": torch.arange(3)}, ctx.scratch("object.bin"))
    held = torch.load(ctx.scratch("object.bin"), weights_only=True)
    _same(held, {"a": torch.arange(3)}, "the object that save wrote")


@check(
    "checkpointer", alone=True,
    on_ranks="If one rank cannot save, every rank raises an error, and the earlier checkpoint loads.",
)  # fmt: skip
def failing(ctx: CheckContext) -> None:
    """A save that fails halfway raises an error and leaves no checkpoint, and the earlier one loads."""
    run, target = Training(ctx), _target(ctx, "fails")
    trouble = "no space left on device"
    for blocking in (True, False):
        run.accelerator.save_state(target)
        before, count = run.snapshot(), run.count
        run.go_on(4 if blocking else 6)
        if run.accelerator.process_index == ctx.size - 1:
            count.trouble = trouble
        for place in (target, _target(ctx, f"absent_{blocking}")):
            wrong = "a save succeeded, although a rank could not save"
            try:
                run.accelerator.save_state(place, blocking=blocking)
                run.accelerator.wait_for_checkpoint()
            except CheckpointError as error:
                wrong = "" if trouble in str(error) else f"the error lacks the reason: {error}"
            run.fail_together(wrong)
            if place != target:
                run.refuses(place, "that was never completed")
        count.trouble = ""
        told = raised(CheckpointError, lambda: run.load(target))
        run.fail_together(
            f"the earlier checkpoint does not load after a failed save: {told}" * bool(told)
        )
        run.is_as(before, "the earlier checkpoint after a failed save")
    run.go_on(8)
    run.accelerator.save_state(target)


#: Damaged checkpoints that the check `ending` tries to load.
_TRIED = 3


def _damages(ctx: CheckContext, target: str, needed: bool = True) -> Iterator[str]:
    """Damage a checkpoint in one way after another, and repair it in between; yield what was done.

    Args:
        needed: skip the check if there is nothing to damage.
    """
    if named := ctx.options.get("damage"):
        yield from pkgutil.resolve_name(named)(target)
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
    if needed and not paths:
        ctx.skip(f"there are no files at {target}, and the option 'damage' is not set")


@check(
    "checkpointer", alone=True,
    on_ranks="Every rank refuses a damaged checkpoint, even if only one rank would read the damage.",
)  # fmt: skip
def damaged(ctx: CheckContext) -> str:
    """A checkpoint with missing, cut or changed files is refused by name, and changes nothing."""
    run, target = Training(ctx), _target(ctx, "damaged")
    run.go_on(3)
    run.accelerator.save_state(target)
    run.go_on(4)
    before, tried = run.snapshot(), 0
    damages = _damages(ctx, target) if ctx.rank == 0 else iter(())
    while True:
        what = run.accelerator.communicator.broadcast_object(next(damages, None))
        if not what:
            break
        run.refuses(target, what)
        run.is_as(before, f"the run after a checkpoint {what} was refused")
        tried += 1
    run.load(target)
    ctx.equal(tried > 0, True, "the checkpoint was damaged at least once")
    return f"{tried} ways"


@check("checkpointer", alone=True)
def attribution(ctx: CheckContext) -> None:
    """Loading a target that does not exist names the target and the checkpointer."""
    run = Training(ctx)
    record = find(ctx.kind, ctx.name, source="plugins check")
    told = raised(CheckpointError, lambda: run.load(_target(ctx, "never_saved")))
    assert told, "load_state accepted a target that does not exist"
    notes = " ".join(getattr(told, "__notes__", ()))
    ctx.equal("never_saved" in str(told), True, f"the error names the target: {told}")
    # Errors of our own packages need no note; those of a third-party plugin name it.
    if record.distribution not in catalog.distributions():
        ctx.equal(record.label in notes, True, f"the notes name {record.label}: {notes}")


class _Loaded:
    """Records when it is unpickled."""

    happened = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, ()


def _unpickled() -> _Loaded:
    _Loaded.happened = True
    return _Loaded()


@check("checkpointer", alone=True)
def pickles(ctx: CheckContext) -> str | None:
    """Python objects in a state are only unpickled with `trust=True`."""
    run, target = Training(ctx), _target(ctx, "pickles")
    run.count.seen = _Loaded()  # type: ignore[assignment]
    try:
        run.accelerator.save_state(target)
    except CheckpointError as error:
        return f"not saved: {error}"
    _Loaded.happened = False
    run.refuses(target, "with a Python object in it")
    ctx.equal(_Loaded.happened, False, "a Python object was unpickled")
    run.load(target, trust=True)
    ctx.equal(_Loaded.happened, True, "the Python object was unpickled with trust=True")
    return None


@check(
    "checkpointer", alone=True,
    on_ranks="`blocking=False` saves the state at the time of the call on every rank.",
)  # fmt: skip
def beside_training(ctx: CheckContext) -> None:
    """`blocking=False` saves the state at the time of the call while training continues."""
    run, target = Training(ctx), _target(ctx, "beside")
    run.go_on(4)
    with held_threads():
        run.accelerator.save_state(target, blocking=False)
        run.go_on(run.END)
        expected = run.snapshot()
    run.accelerator.wait_for_checkpoint()
    ctx.end()
    run = Training(ctx, seed=3)
    run.load(target)
    run.go_on(run.END)
    run.is_as(expected, "resumed from a save in the background")


@check("checkpointer", alone=True)
def naming(ctx: CheckContext) -> str | None:
    """Automatic names and `total_limit` work, or are refused when the Accelerator is created."""

    def training() -> Training:
        project = ProjectConfiguration(
            str(ctx.scratch("naming")), automatic_checkpoint_naming=True, total_limit=2
        )
        return Training(ctx, project_config=project)

    try:
        run = training()
    except ConfigurationError as error:
        return f"refused: {error}"
    saved = []
    for until in (2, 4, 6):
        run.go_on(until)
        saved.append(run.accelerator.save_state())
    expected = run.snapshot()
    ctx.equal(len(set(saved)), 3, f"names of three saves, {saved}")
    run.refuses(saved[0], "that total_limit=2 deletes")
    run.load(saved[1])
    ctx.end()
    run = training()
    ctx.equal(run.load(), saved[2], "the newest checkpoint")
    run.is_as(expected, "the newest checkpoint")
    ctx.equal(run.accelerator.save_state() in saved, False, "the next name repeats an earlier one")
    return None


@check("checkpointer", alone=True)
def ending(ctx: CheckContext) -> None:
    """No thread, process or file is left after failed loads, `free_memory`, `end_training` or an error."""
    lives = Lives(ctx, places=(ctx.folder, Path(_target(ctx, "ending"))))
    target = _target(ctx, "ending")
    for turn in range(3):
        with lives.one(), warnings.catch_warnings():
            run = Training(ctx)
            for blocking in (True, False):
                run.accelerator.save_state(target, blocking=blocking)
            run.accelerator.wait_for_checkpoint()
            run.refuses(_target(ctx, "never_saved"), "that does not exist")
            for number, what in enumerate(_damages(ctx, target, needed=False)):
                if number < _TRIED:
                    run.refuses(target, what)
            if turn == 0:
                run.accelerator.free_memory()
            if turn < 2:
                run.accelerator.end_training()
            else:
                script_raises(ctx, run.accelerator)
            run.accelerator.end_training()
    lives.check()
