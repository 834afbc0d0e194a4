"""Checkpoints of a backend: what is saved, loaded, and gone on from."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate_checkpoint.manifest import MANIFEST
from accelerate_core import Accelerator
from accelerate_core.errors import CheckpointError
from accelerate_testing.checks import check
from accelerate_testing.lab import BATCH, MOMENTUM, RATE, Lab, Net, loss_of

#: Micro-batches of an epoch; two make a step, so the save is inside of a cycle.
SAVED_AFTER, STOPPED_AFTER, BATCHES = 5, 10, 12


@check("backend")
def save_and_load(lab: Lab) -> str | None:
    """What `save_state` wrote brings weights, buffers and optimizer state back."""
    accelerator = lab.accelerator()
    # Adam has more than one tensor per parameter, and a count.
    model: Any = lab.net(accelerator)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 0.01))
    mine, _ = lab.batches(accelerator, 4)
    lab.train(accelerator, model, optimizer, mine[:2])
    saved = lab.weights(accelerator, model)
    path = accelerator.save_state(str(lab.scratch("save_and_load")))
    losses = lab.train(accelerator, model, optimizer, mine[2:])
    after = lab.weights(accelerator, model)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1.0)
    accelerator.load_state(path)
    lab.close(lab.weights(accelerator, model), saved, "weights after load_state", 1e-7)
    again = lab.train(accelerator, model, optimizer, mine[2:])
    lab.close(again, losses, "losses after load_state", 1e-6)
    lab.close(lab.weights(accelerator, model), after, "weights two steps later", 1e-6)
    if "checkpoint" not in accelerator.backend.owns:
        state = dict(accelerator.hooks.model_state(accelerator, model))
        if state:  # one that writes shards of its own hands the core nothing
            _is_strict(lab, accelerator, model, state)
    return None


@check("backend")
def save_later(lab: Lab) -> str | None:
    """`save_state(blocking=False)` keeps the state of the call, whatever training does meanwhile."""

    def objects(seed: int) -> tuple[Accelerator, Any, Any]:
        accelerator = lab.accelerator()
        model: Any = lab.net(accelerator, seed)
        made = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 0.01))
        return accelerator, *made

    accelerator, model, optimizer = objects(0)
    mine, _ = lab.batches(accelerator, 6)
    lab.train(accelerator, model, optimizer, mine[:2])
    with lab.held_threads():
        path = accelerator.save_state(str(lab.scratch("save_later")), blocking=False)
        lab.train(accelerator, model, optimizer, mine[2:])
        expected = lab.weights(accelerator, model)
    accelerator.wait_for_checkpoint()
    del accelerator, model, optimizer
    lab.end()
    accelerator, model, optimizer = objects(5)
    accelerator.load_state(path)
    lab.train(accelerator, model, optimizer, mine[2:])
    lab.close(lab.weights(accelerator, model), expected, "weights four steps later", 1e-6)
    return None


def _is_strict(lab: Lab, accelerator: Accelerator, model: Any, state: dict[str, Any]) -> None:
    """A state that lacks a tensor is refused, unless `strict` is False."""
    lacking = dict(list(state.items())[1:])
    accelerator.hooks.load_model_state(accelerator, model, lacking, False)
    try:
        accelerator.hooks.load_model_state(accelerator, model, lacking, True)
    except Exception:  # whichever says so
        return
    raise AssertionError(
        f"load_model_state(strict=True) takes a state without {next(iter(state))!r}"
    )


def _objects(lab: Lab, seed: int) -> tuple[Accelerator, Any, Any, Any, Any]:
    """Return all a run has, with a loader that shuffles, under accumulation."""
    accelerator = lab.accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(3)
    model = Net(seed)
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9)
    x = torch.randn(BATCHES * BATCH * lab.size, 6, generator=torch.Generator().manual_seed(9))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    return (accelerator, *accelerator.prepare(model, optimizer, scheduler, loader))


def _batches(parts: Any) -> Iterator[int]:
    """Train on the batches of the loader; yield how many there were after each."""
    accelerator, model, optimizer, scheduler, loader = parts
    for done, batch in enumerate(loader, 1):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        yield done


def _never_stopped(lab: Lab, name: str) -> dict[str, torch.Tensor]:
    """Train to the middle of a cycle and save, then train on; return the weights in the end."""
    parts = _objects(lab, lab.rank)
    for done in _batches(parts):
        if done == SAVED_AFTER:
            parts[0].save_state(str(lab.scratch(name)))
        if done == STOPPED_AFTER:
            break
    return lab.weights(parts[0], parts[1])


@check("backend")
def resume(lab: Lab) -> str | None:
    """New objects that load a checkpoint end where the run would have, were it never stopped."""
    expected = _never_stopped(lab, "resume")
    lab.end()
    parts = _objects(lab, 10 + lab.rank)
    parts[0].load_state(str(lab.scratch("resume")))
    _finish_resumed(parts)
    lab.close(lab.weights(parts[0], parts[1]), expected, "weights at the end", 1e-6)
    return f"saved after {SAVED_AFTER} micro-batches of {STOPPED_AFTER}, inside of a cycle"


def _finish_resumed(parts: Any) -> None:
    """Train to where the other run stopped; a backend may have gone back to its last step."""
    left = STOPPED_AFTER - int(parts[-1].state_dict()["batches_seen"])
    for done in _batches(parts):
        if done == left:
            return


@check("backend")
def save_fails(lab: Lab) -> str | None:
    """Where one rank cannot save, every rank is told, nothing is left, and training goes on."""
    accelerator = lab.accelerator()
    model, optimizer = lab.ready(accelerator)
    mine, _ = lab.batches(accelerator, 2)

    class Faulty:
        fails = True

        def state_dict(self) -> dict[str, int]:
            if self.fails and accelerator.process_index == lab.size - 1:
                raise OSError("nothing left to write on")
            return {"fine": 1}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    faulty = Faulty()
    accelerator.register_for_checkpointing(faulty)
    target = lab.scratch("save_fails")
    try:
        accelerator.save_state(str(target))
    except CheckpointError as error:
        lab.equal("nothing left to write on" in str(error), True, f"the reason is told: {error}")
    else:
        raise AssertionError("save_state returned, although a rank could not save")
    lab.equal(target.exists(), False, "a checkpoint is there that no rank completed")
    faulty.fails = False
    lab.train(accelerator, model, optimizer, mine)
    accelerator.save_state(str(target))
    lab.equal((target / MANIFEST).exists(), True, "the checkpoint has a manifest")
    return None


def _die(lab: Lab) -> None:
    """Train past a checkpoint, keep what came out, and die without a word."""
    expected = _never_stopped(lab, "kill")
    if lab.rank == 0:
        torch.save(expected, lab.scratch("never_killed.pt"))
        os.sync()
    for accelerator in lab._made:
        accelerator.wait_for_everyone()
    os.kill(os.getpid(), signal.SIGKILL)


@check("backend", place="kill", before=_die)
def kill(lab: Lab) -> str | None:
    """After SIGKILL on every rank, new processes load and end with the weights of a run never killed."""
    expected = torch.load(lab.scratch("never_killed.pt"), weights_only=True)
    parts = _objects(lab, 10 + lab.rank)
    parts[0].load_state(str(lab.scratch("kill")))
    _finish_resumed(parts)
    lab.close(lab.weights(parts[0], parts[1]), expected, "weights at the end", 1e-6)
    return None
