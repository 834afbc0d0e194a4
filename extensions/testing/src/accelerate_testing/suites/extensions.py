"""What an extension must do: not disturb training, and restore its state."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch

from accelerate_core.plugin import flatten, map_tensors
from accelerate_testing.checks import SAVE, STEP, check
from accelerate_testing.context import CheckContext
from accelerate_testing.training import Trainer, draw, plain_training, seed

#: Number of elements up to which a tensor is compared as a list.
_ELEMENTS = 1024
#: Seconds after which a served clock has changed, even one in whole seconds.
_STILL = 1.1


def _begin(ctx: CheckContext) -> Trainer:
    """Prepare a model with the extension active; the runner has set the variable for that."""
    trainer = Trainer.begin(ctx)
    active = [record.name for record, _, _ in trainer.accelerator._setup.plugins.plugins]
    assert ctx.name in active, f"{ctx.name} is not among the active plugins {active}"
    return trainer


@check("extension", alone=True, hooks="convert on_start prepare_objects on_step_end")
def one_process(ctx: CheckContext) -> str:
    """A run with it has the same losses and random numbers as one without it (options: changes_training)."""
    trainer = _begin(ctx)
    mine, whole = trainer.batches(4)
    seed(1)
    losses = trainer.train(mine)
    told = draw("training")
    trainer.accelerator.end_training()
    if not ctx.options.get("changes_training", False):
        ctx.close(losses, plain_training(whole)[0], "losses")
        seed(1)
        ctx.equal(
            told, draw("training"), "random numbers after the seed was set (dropout, shuffling)"
        )
    return f"{len(mine)} steps"


@check("extension", alone=True, hooks=SAVE)
def save_and_load(ctx: CheckContext) -> str | None:
    """Attributes and losses continue after a checkpoint is loaded in another Accelerator."""
    trainer = _begin(ctx)
    mine, _ = trainer.batches(3)
    trainer.train(mine)
    path = trainer.accelerator.save_state(str(ctx.scratch("extension")))
    # Only the attributes that don't change while nothing happens.
    first = _plain_attributes(trainer)
    time.sleep(_STILL)
    second = _plain_attributes(trainer)
    no_state = ctx.options.get("not_saved", ())
    served = {
        key: value
        for key, value in first.items()
        if key not in no_state and key in second and second[key] == value
    }
    losses = trainer.train(mine)
    ctx.end()
    trainer = _begin(ctx)
    trainer.accelerator.load_state(path)
    now = _plain_attributes(trainer)
    changed = [
        f"{key} is {_short(now.get(key))} instead of {_short(value)}"
        for key, value in served.items()
        if now.get(key) != value
    ]
    assert not changed, (
        f"after load_state, {' and '.join(changed)} (option not_saved: attributes that aren't state)"
    )
    ctx.close(trainer.train(mine), losses, "losses after load_state", 1e-6)
    return ", ".join(served) or None


def _plain_attributes(trainer: Trainer) -> dict[str, Any]:
    """Return copies of the attributes that are numbers, strings, tensors, or contain these."""
    accelerator = trainer.accelerator
    found = dict[str, Any]()
    for attributes in accelerator._shared_hooks.call_each("state_attributes"):
        for key, value in attributes.items():
            if isinstance(value, torch.nn.Module):
                continue
            told = map_tensors(_listed, value)
            if _is_plain(told):
                found[key] = copy.deepcopy(told)
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."


def _listed(tensor: torch.Tensor) -> Any:
    """Return the numbers of a small tensor as a list."""
    return tensor.tolist() if tensor.numel() <= _ELEMENTS else tensor


def _is_plain(value: Any) -> bool:
    return all(
        _is_plain(list(leaf))
        if isinstance(leaf, set | frozenset)
        else isinstance(leaf, int | float | str | bytes | None)
        for leaf in flatten(value)
    )


@check(
    "extension",
    hooks=f"convert on_start reduce_gradients prepare_objects on_step_end on_save on_load {STEP}",
)
def two_processes(ctx: CheckContext) -> str:
    """Two processes train, save and load with it, and have the same model each time.

    They have the losses of a run without it (options: changes_training).
    """
    trainer = _begin(ctx)
    accelerator = trainer.accelerator
    mine, whole = trainer.batches(3)
    apart = ctx.options.get("ranks_differ", False)
    losses = trainer.train(mine)
    ctx.alike(accelerator, losses, "losses")
    if not ctx.options.get("changes_training", False):
        ctx.close(losses, plain_training(whole)[0], "losses")
    if not apart:
        trainer.same_everywhere("the trained model (options: ranks_differ)")
    path = accelerator.save_state(str(ctx.scratch("extension_ranks")))
    accelerator.load_state(path)
    ctx.alike(accelerator, trainer.train(mine), "losses after loading")
    if not apart:
        trainer.same_everywhere("the model after loading and training on")
    return f"over {accelerator.backend.name}"
