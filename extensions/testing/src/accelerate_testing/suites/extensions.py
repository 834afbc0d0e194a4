"""What an extension keeps: it is told, it does not disturb, and its state comes back."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any

import torch

from accelerate_testing.checks import check
from accelerate_testing.lab import Lab, draw, plain_training, seed

#: Elements up to which a tensor is compared as a list.
_ELEMENTS = 1024
#: Seconds after which a clock that is served, in whole seconds too, has moved.
_STILL = 1.1


def _active(lab: Lab, **arguments: Any) -> Any:
    """Return an Accelerator in which the extension is active: its runner sets the variable."""
    accelerator = lab.accelerator(**arguments)
    active = [record.name for record, _, _ in accelerator._plugins.plugins]
    lab.equal(lab.name in active, True, f"active plugins {active} have it")
    return accelerator


@check("extension", place="alone")
def one_process(lab: Lab) -> str | None:
    """A run with it trains and draws as one without it, unless it says that it changes training."""
    accelerator = _active(lab)
    model, optimizer = lab.ready(accelerator)
    mine, whole = lab.batches(accelerator, 4)
    seed(1)
    losses = lab.train(accelerator, model, optimizer, mine)
    told = draw("training")
    accelerator.end_training()
    if not lab.options.get("changes_training", False):
        lab.close(losses, plain_training(whole)[0], "losses")
        seed(1)
        lab.equal(
            told,
            draw("training"),
            "what is drawn at random (dropout, shuffling), the seed being set",
        )
    return f"{len(mine)} steps"


@check("extension", place="alone")
def save_and_load(lab: Lab) -> str | None:
    """What it serves and what it does to training go on after a load in another Accelerator."""
    accelerator = _active(lab)
    model, optimizer = lab.ready(accelerator)
    mine, _ = lab.batches(accelerator, 3)
    lab.train(accelerator, model, optimizer, mine)
    path = accelerator.save_state(str(lab.scratch("extension")))
    served = _served(lab, accelerator)
    losses = lab.train(accelerator, model, optimizer, mine)
    lab.end()
    accelerator = _active(lab)
    model, optimizer = lab.ready(accelerator)
    accelerator.load_state(path)
    now = _plain_attributes(accelerator)
    lab.equal(
        {key: now.get(key) for key in served}, served,
        "attributes it serves, after load_state (options: not_saved names those that are no state)",
    )  # fmt: skip
    again = lab.train(accelerator, model, optimizer, mine)
    lab.close(again, losses, "losses after load_state", 1e-6)
    return ", ".join(served) or None


def _served(lab: Lab, accelerator: Any) -> dict[str, Any]:
    """Return the plain values it serves that stand still while nothing happens."""
    first = _plain_attributes(accelerator)
    time.sleep(_STILL)
    second = _plain_attributes(accelerator)
    no_state = lab.options.get("not_saved", ())
    return {
        key: value
        for key, value in first.items()
        if key not in no_state and key in second and second[key] == value
    }


def _plain_attributes(accelerator: Any) -> dict[str, Any]:
    """Return a copy of the attributes that are numbers, texts, small tensors, or hold such."""
    found: dict[str, Any] = {}
    for attributes in accelerator._plugins.call_each("state_attributes", accelerator=accelerator):
        for key, value in attributes.items():
            small = isinstance(value, torch.Tensor) and value.numel() <= _ELEMENTS
            told = value.tolist() if small else value
            if _is_plain(told):
                found[key] = copy.deepcopy(told)
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return _is_plain(list(value)) and _is_plain(list(value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str | bytes)


@check("extension")
def two_processes(lab: Lab) -> str | None:
    """Two processes train, save and load with it, and have the same model after each."""
    from accelerate_testing.suites.precisions import some_backend

    some_backend()
    accelerator = _active(lab)
    model, optimizer = lab.ready(accelerator)
    mine, _ = lab.batches(accelerator, 2)
    lab.alike(accelerator, lab.train(accelerator, model, optimizer, mine), "losses")
    apart = lab.options.get("ranks_differ", False)
    if not apart:
        lab.same_everywhere(accelerator, model, "the trained model (options: ranks_differ)")
    path = accelerator.save_state(str(lab.scratch("extension_ranks")))
    accelerator.load_state(path)
    lab.alike(accelerator, lab.train(accelerator, model, optimizer, mine), "losses after loading")
    if not apart:
        lab.same_everywhere(accelerator, model, "the model that was loaded and trained on")
    return f"over {accelerator.backend.name}"
