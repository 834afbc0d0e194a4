"""Checkpoints of a backend: saving, loading, and continuing."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from accelerate_checkpoint.manifest import MANIFEST
from accelerate_core.plugin import CheckpointError
from accelerate_testing.checks import SAVE, check
from accelerate_testing.context import CheckContext, raised
from accelerate_testing.training import Net, ResumableTrainer, Trainer, adam, held_threads, sgd

#: Micro-batches before the save. Two make a step, so the save is inside a cycle.
SAVED_AFTER = 5


@check("backend", hooks=SAVE)
def save_and_load(ctx: CheckContext) -> None:
    """`load_state` restores the weights, buffers and optimizer state that `save_state` wrote."""
    trainer = Trainer.begin(ctx, adam)
    accelerator, model = trainer.accelerator, trainer.model
    mine, _ = trainer.batches(4)
    trainer.train(mine[:2])
    saved = trainer.weights()
    path = accelerator.save_state(str(ctx.scratch("save_and_load")))
    losses = trainer.train(mine[2:])
    after = trainer.weights()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1.0)
    accelerator.load_state(path)
    ctx.close(trainer.weights(), saved, "weights after load_state", 1e-7)
    again = trainer.train(mine[2:])
    ctx.close(again, losses, "losses after load_state", 1e-6)
    ctx.close(trainer.weights(), after, "weights two steps later", 1e-6)
    if "checkpoint" not in accelerator.backend.owns:
        state = dict(accelerator.hooks.model_state(model))
        if state:  # empty if the backend writes its own shards
            _is_strict(trainer, state)


def _is_strict(trainer: Trainer, state: dict[str, Any]) -> None:
    """A state without one of the tensors is refused, unless `strict` is False."""
    accelerator, model = trainer.accelerator, trainer.model
    load = accelerator.hooks.load_model_state
    lacking = dict(list(state.items())[1:])
    load(model, lacking, False)
    refused = raised(Exception, lambda: load(model, lacking, True))
    assert refused, f"load_model_state(strict=True) accepts a state without {next(iter(state))!r}"


@check("backend", hooks=SAVE)
def save_later(ctx: CheckContext) -> None:
    """`save_state(blocking=False)` saves the state at the time of the call while training continues."""
    trainer = Trainer.begin(ctx, adam)
    mine, _ = trainer.batches(6)
    trainer.train(mine[:2])
    with held_threads():
        path = trainer.accelerator.save_state(str(ctx.scratch("save_later")), blocking=False)
        trainer.train(mine[2:])
        expected = trainer.weights()
    trainer.accelerator.wait_for_checkpoint()
    del trainer
    ctx.end()
    trainer = _loaded(ctx, path)
    trainer.train(mine[2:])
    ctx.close(trainer.weights(), expected, "weights four steps later", 1e-6)


def _run(ctx: CheckContext, seed: int) -> ResumableTrainer:
    return ResumableTrainer(ctx, 3, lambda: Net(seed), sgd)


def _never_stopped(ctx: CheckContext, name: str) -> dict[str, torch.Tensor]:
    """Train to the middle of a cycle, save, and train on; return the final weights."""
    run = _run(ctx, ctx.rank)
    run.go_on(SAVED_AFTER)
    if run.accelerator.backend.supports.get("gradients", True) is False:
        refused = raised(
            CheckpointError, lambda: run.accelerator.save_state(str(ctx.scratch(name)))
        )
        assert refused, "a save in the middle of a cycle lost the gradients without an error"
        run.go_on(SAVED_AFTER + 1)  # the last micro-batch of the cycle
    run.accelerator.save_state(str(ctx.scratch(name)))
    run.go_on(run.END)
    return run.weights()


def _resumed(ctx: CheckContext, name: str) -> dict[str, torch.Tensor]:
    """Load into new objects and train to the end; return the final weights."""
    run = _run(ctx, 10 + ctx.rank)
    run.load(str(ctx.scratch(name)))  # a backend may continue from its last step
    run.go_on(run.END)
    return run.weights()


@check("backend", hooks=SAVE)
def resume(ctx: CheckContext) -> str:
    """A run that loads a checkpoint into new objects ends with the weights of an uninterrupted run."""
    expected = _never_stopped(ctx, "resume")
    ctx.end()
    ctx.close(_resumed(ctx, "resume"), expected, "weights at the end", 1e-6)
    return f"saved after {SAVED_AFTER} micro-batches, inside a cycle"


@check("backend", hooks=SAVE)
def save_fails(ctx: CheckContext) -> None:
    """If one rank cannot save, every rank raises an error, nothing is left, and training can continue."""
    trainer = Trainer.begin(ctx)
    accelerator = trainer.accelerator

    class Faulty:
        fails = True

        def state_dict(self) -> dict[str, int]:
            if self.fails and accelerator.process_index == ctx.size - 1:
                raise OSError("no space left on device")
            return {"fine": 1}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    faulty = Faulty()
    accelerator.register_for_checkpointing(faulty)
    target = ctx.scratch("save_fails")
    told = raised(CheckpointError, lambda: accelerator.save_state(str(target)))
    assert told, "save_state returned, although a rank could not save"
    ctx.equal("no space left on device" in str(told), True, f"the error has the reason: {told}")
    ctx.equal(target.exists(), False, "an incomplete checkpoint exists")
    faulty.fails = False
    trainer.train(trainer.batches(2)[0])
    accelerator.save_state(str(target))
    ctx.equal((target / MANIFEST).exists(), True, "the checkpoint has a manifest")


def _loaded(ctx: CheckContext, path: str) -> Trainer:
    """Load a checkpoint into new objects."""
    trainer = Trainer.begin(ctx, adam, seed=5)
    trainer.accelerator.load_state(path)
    return trainer


@check("backend", hooks=SAVE)
def another_size(ctx: CheckContext) -> str:
    """One process loads a checkpoint of several, several load one of one, and both continue correctly."""
    trainer = Trainer.begin(ctx, adam)
    mine, whole = trainer.batches(4)
    device = trainer.accelerator.device
    # If ranks may have different weights, a rank that did not save can have any.
    near, size = 1e-5 if trainer.exact else 1e3, ctx.size
    trainer.train(mine[:2])
    saved = trainer.weights()
    path = trainer.accelerator.save_state(str(ctx.scratch("of_all")))
    trainer.train(mine[2:])
    after = trainer.weights()
    del trainer
    with ctx.each_alone():
        trainer = _loaded(ctx, path)
        what = f"in one process, from a checkpoint of {size} ranks"
        ctx.close(trainer.weights(), saved, f"weights {what}", near)
        path = trainer.accelerator.save_state(str(ctx.scratch(f"of_one_{ctx.rank}")))
        trainer.train([(x.to(device), y.to(device)) for x, y in whole[2:]])
        ctx.close(trainer.weights(), after, f"weights two steps later, {what}", near)
        del trainer
    trainer = _loaded(ctx, str(ctx.scratch("of_one_0")))
    what = f"on {ctx.size} ranks, from a checkpoint of one process"
    ctx.close(trainer.weights(), saved, f"weights {what}", near)
    trainer.train(mine[2:])
    ctx.close(trainer.weights(), after, f"weights two steps later, {what}", near)
    return f"{ctx.size} and 1"


def _die(ctx: CheckContext) -> None:
    """Save, train on, keep the final weights, and end with SIGKILL."""
    expected = _never_stopped(ctx, "kill")
    if ctx.rank == 0:
        torch.save(expected, ctx.scratch("never_killed.pt"))
        os.sync()
    for accelerator in ctx.made:
        accelerator.wait_for_everyone()
    os.kill(os.getpid(), signal.SIGKILL)


@check("backend", before=_die, hooks=SAVE)
def kill(ctx: CheckContext) -> None:
    """After SIGKILL on every rank, new processes load and end with the weights of an uninterrupted run."""
    expected = torch.load(ctx.scratch("never_killed.pt"), weights_only=True)
    ctx.close(_resumed(ctx, "kill"), expected, "weights at the end", 1e-6)
