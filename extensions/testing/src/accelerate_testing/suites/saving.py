"""Checkpoints of a backend: what is saved, loaded, and gone on from."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from accelerate_checkpoint.manifest import MANIFEST
from accelerate_core.errors import CheckpointError
from accelerate_testing.checks import SAVE, check
from accelerate_testing.context import CheckContext, raised
from accelerate_testing.training import Net, ResumableTrainer, Trainer, adam, held_threads, sgd

#: Micro-batches; two make a step, so the save is inside of a cycle.
SAVED_AFTER = 5


@check("backend", hooks=SAVE)
def save_and_load(ctx: CheckContext) -> None:
    """What `save_state` wrote brings weights, buffers and optimizer state back."""
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
        if state:  # one that writes shards of its own hands the core nothing
            _is_strict(trainer, state)


def _is_strict(trainer: Trainer, state: dict[str, Any]) -> None:
    """A state that lacks a tensor is refused, unless `strict` is False."""
    accelerator, model = trainer.accelerator, trainer.model
    load = accelerator.hooks.load_model_state
    lacking = dict(list(state.items())[1:])
    load(model, lacking, False)
    refused = raised(Exception, lambda: load(model, lacking, True))
    assert refused, f"load_model_state(strict=True) takes a state without {next(iter(state))!r}"


@check("backend", hooks=SAVE)
def save_later(ctx: CheckContext) -> None:
    """`save_state(blocking=False)` keeps the state of the call, whatever training does meanwhile."""
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
    """Train to the middle of a cycle and save, then train on; return the weights in the end."""
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
    """Load in new objects and train to where the other run stopped; return the weights there."""
    run = _run(ctx, 10 + ctx.rank)
    run.load(str(ctx.scratch(name)))  # a backend may go back to its last step
    run.go_on(run.END)
    return run.weights()


@check("backend", hooks=SAVE)
def resume(ctx: CheckContext) -> str:
    """New objects that load a checkpoint end where the run would have, were it never stopped."""
    expected = _never_stopped(ctx, "resume")
    ctx.end()
    ctx.close(_resumed(ctx, "resume"), expected, "weights at the end", 1e-6)
    return f"saved after {SAVED_AFTER} micro-batches of {ResumableTrainer.END}, inside of a cycle"


@check("backend", hooks=SAVE)
def save_fails(ctx: CheckContext) -> None:
    """Where one rank cannot save, every rank is told, nothing is left, and training goes on."""
    trainer = Trainer.begin(ctx)
    accelerator = trainer.accelerator

    class Faulty:
        fails = True

        def state_dict(self) -> dict[str, int]:
            if self.fails and accelerator.process_index == ctx.size - 1:
                raise OSError("nothing left to write on")
            return {"fine": 1}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    faulty = Faulty()
    accelerator.register_for_checkpointing(faulty)
    target = ctx.scratch("save_fails")
    told = raised(CheckpointError, lambda: accelerator.save_state(str(target)))
    assert told, "save_state returned, although a rank could not save"
    ctx.equal("nothing left to write on" in str(told), True, f"the reason is told: {told}")
    ctx.equal(target.exists(), False, "a checkpoint is there that no rank completed")
    faulty.fails = False
    trainer.train(trainer.batches(2)[0])
    accelerator.save_state(str(target))
    ctx.equal((target / MANIFEST).exists(), True, "the checkpoint has a manifest")


def _loaded(ctx: CheckContext, path: str) -> Trainer:
    """Load a checkpoint in new objects."""
    trainer = Trainer.begin(ctx, adam, seed=5)
    trainer.accelerator.load_state(path)
    return trainer


@check("backend", hooks=SAVE)
def another_size(ctx: CheckContext) -> str:
    """One process loads what several saved, they load what it saves, and both go on as those would have."""
    trainer = Trainer.begin(ctx, adam)
    mine, whole = trainer.batches(4)
    device = trainer.accelerator.device
    # Where each rank is somewhere else, one that was not there can be anywhere.
    near, size = 1e-5 if trainer.exact else 1e3, ctx.size
    trainer.train(mine[:2])
    saved = trainer.weights()
    path = trainer.accelerator.save_state(str(ctx.scratch("of_all")))
    trainer.train(mine[2:])
    after = trainer.weights()
    del trainer
    with ctx.each_alone():
        trainer = _loaded(ctx, path)
        what = f"in one process, of a checkpoint of {size} ranks"
        ctx.close(trainer.weights(), saved, f"weights {what}", near)
        path = trainer.accelerator.save_state(str(ctx.scratch(f"of_one_{ctx.rank}")))
        trainer.train([(x.to(device), y.to(device)) for x, y in whole[2:]])
        ctx.close(trainer.weights(), after, f"weights two steps later, {what}", near)
        del trainer
    trainer = _loaded(ctx, str(ctx.scratch("of_one_0")))
    what = f"on {ctx.size} ranks, of a checkpoint of one process"
    ctx.close(trainer.weights(), saved, f"weights {what}", near)
    trainer.train(mine[2:])
    ctx.close(trainer.weights(), after, f"weights two steps later, {what}", near)
    return f"{ctx.size} and 1"


def _die(ctx: CheckContext) -> None:
    """Train past a checkpoint, keep what came out, and die without a word."""
    expected = _never_stopped(ctx, "kill")
    if ctx.rank == 0:
        torch.save(expected, ctx.scratch("never_killed.pt"))
        os.sync()
    for accelerator in ctx.made:
        accelerator.wait_for_everyone()
    os.kill(os.getpid(), signal.SIGKILL)


@check("backend", before=_die, hooks=SAVE)
def kill(ctx: CheckContext) -> None:
    """After SIGKILL on every rank, new processes load and end with the weights of a run never killed."""
    expected = torch.load(ctx.scratch("never_killed.pt"), weights_only=True)
    ctx.close(_resumed(ctx, "kill"), expected, "weights at the end", 1e-6)
