"""What an extension keeps: it is told, it does not disturb, and its state comes back."""

from __future__ import annotations

from typing import Any

from accelerate_core.testing.checks import check
from accelerate_core.testing.lab import Lab, plain_training


def _active(lab: Lab, **arguments: Any) -> Any:
    """Return an Accelerator in which the extension is active: its runner sets the variable."""
    accelerator = lab.accelerator(**arguments)
    active = [record.name for record, _, _ in accelerator.plugins.plugins]
    lab.equal(lab.name in active, True, f"active plugins {active} have it")
    return accelerator


@check("extension", place="alone")
def one_process(lab: Lab) -> str | None:
    """A run with it trains as one without it, unless it says that it changes training."""
    accelerator = _active(lab)
    model, optimizer = lab.ready(accelerator)
    mine, whole = lab.batches(accelerator, 4)
    losses = lab.train(accelerator, model, optimizer, mine)
    accelerator.end_training()
    if not lab.options.get("changes_training", False):
        lab.close(losses, plain_training(whole)[0], "losses")
    return f"{len(mine)} steps"


@check("extension", place="alone")
def save_and_load(lab: Lab) -> str | None:
    """What it writes into a checkpoint is read again, also by a run that never wrote one."""
    accelerator = _active(lab)
    model, optimizer = lab.ready(accelerator)
    mine, _ = lab.batches(accelerator, 2)
    lab.train(accelerator, model, optimizer, mine)
    path = accelerator.save_state(str(lab.scratch("extension")))
    served = _served(accelerator)
    lab.end()
    accelerator = _active(lab)
    model, optimizer = lab.ready(accelerator)
    accelerator.load_state(path)
    lab.equal(_served(accelerator), served, "attributes it serves, after load_state")
    lab.train(accelerator, model, optimizer, mine)
    return ", ".join(served) or None


def _served(accelerator: Any) -> dict[str, Any]:
    """Return the plain values the extension serves as attributes."""
    found: dict[str, Any] = {}
    for attributes in accelerator.plugins.call_each("state_attributes", accelerator=accelerator):
        found.update({k: v for k, v in attributes.items() if isinstance(v, int | str | bool)})
    return found


@check("extension", place="alone")
def errors(lab: Lab) -> str | None:
    """An exception in the user's block passes through unchanged."""
    accelerator = _active(lab)
    try:
        with accelerator:
            raise KeyError("of the script")
    except KeyError as error:
        lab.equal(error.args, ("of the script",), "the exception")
    else:
        raise AssertionError("the exception was swallowed")
    return None


@check("extension")
def two_processes(lab: Lab) -> str | None:
    """Two processes train, save and load with it, and end."""
    from accelerate_core.testing.suites.precisions import _some_backend

    _some_backend()
    accelerator = _active(lab)
    model, optimizer = lab.ready(accelerator)
    mine, _ = lab.batches(accelerator, 2)
    lab.alike(accelerator, lab.train(accelerator, model, optimizer, mine), "losses")
    path = accelerator.save_state(str(lab.scratch("extension_ranks")))
    accelerator.load_state(path)
    lab.alike(accelerator, lab.train(accelerator, model, optimizer, mine), "losses after loading")
    return f"over {accelerator.backend.name}"
