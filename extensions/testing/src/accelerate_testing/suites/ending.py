"""The end of a run: as it should be, once more, and by an error."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from accelerate_testing.checks import changed, check
from accelerate_testing.lab import Lab, loss_of
from accelerate_testing.processes import Run
from accelerate_testing.suites.precisions import some_backend

TEXT = "the data of this rank cannot be read"
#: Seconds in which what was told to end may do so.
_GRACE = 2.0


@check("backend", "precision", "extension")
def once_more(lab: Lab) -> str | None:
    """After `end_training` nothing is left, and a second Accelerator trains as the first did."""
    if lab.kind != "backend":
        some_backend()
    seen, held = [], []
    printed = io.StringIO()
    _restore(began)  # what earlier checks left would hide that it is left again
    for turn in range(3):
        with contextlib.redirect_stdout(printed if turn else sys.stdout):
            losses, model = _life(lab, turn)
        lab.end()
        seen.append(losses)
        held.append(held_now())
        lab.equal(model() is None, True, "the model is gone with its last user")
        if turn == 0:
            _restore(began)  # what a library does where it is first used is its own
        for what, now in _process().items():
            lab.equal(changed(now, began.told[what]), [], f"{what} that are not as they were")
    if not lab.options.get("prints", False):
        lab.equal(printed.getvalue(), "", "what it prints where the script prints")
    for turn in (1, 2):
        lab.close(seen[turn], seen[0], "losses of a later Accelerator", 1e-6)
    # What is there for the whole process, such as one worker, was there after the second turn.
    until = time.monotonic() + _GRACE
    while (left := gained(held[1], held_now())) and time.monotonic() < until:
        time.sleep(0.05)
    if left:
        raise AssertionError(f"left of an Accelerator that has ended: {left}")
    return None


def _life(lab: Lab, turn: int) -> tuple[list[float], Any]:
    """Begin, train, save and end; return the losses, and a weak reference to the user's model."""
    accelerator = lab.accelerator()
    model, optimizer = lab.ready(accelerator)
    losses = lab.train(accelerator, model, optimizer, lab.batches(accelerator, 3)[0])
    accelerator.save_state(str(lab.scratch(f"once_more_{turn}")))
    if turn == 2:
        accelerator.free_memory()
    accelerator.end_training()
    accelerator.end_training()  # a second time it does nothing
    lab.equal(torch.distributed.is_initialized(), False, "a process group still runs")
    return losses, weakref.ref(accelerator.unwrap_model(model))


def _process() -> dict[str, dict[Any, Any]]:
    """Return what belongs to the process and not to a plugin."""
    return {
        "variables of the environment": dict(os.environ),
        "signal handlers": {one: signal.getsignal(one) for one in signal.valid_signals()},
        "settings of torch": {
            "get_num_threads": torch.get_num_threads(),
            "are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled(),
            "get_default_dtype": torch.get_default_dtype(),
            "is_autocast_enabled": torch.is_autocast_enabled("cpu")
            or torch.is_autocast_enabled("cuda"),
            "is_grad_enabled": torch.is_grad_enabled(),
            "is_inference_mode_enabled": torch.is_inference_mode_enabled(),
        },
        "settings of the process": {
            "working directory": os.getcwd(),
            "sys.path": list(sys.path),
            "file mode mask": _umask(),
            "filters of all warnings": _filters(),
            "number of handlers of the root logger": len(logging.getLogger().handlers),
        },
    }


def _filters() -> list[str]:
    """Return the filters that are about every warning; a library's own about some are its affair."""
    return [f[0] for f in warnings.filters if _is_for_all(f)]


def _is_for_all(warnings_filter: Any) -> bool:
    return tuple(warnings_filter[1:4]) == (None, Warning, None)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _restore(to: Began) -> None:
    before = to.told
    os.environ.clear()
    os.environ.update(before["variables of the environment"])
    for one, handler in before["signal handlers"].items():
        if signal.getsignal(one) != handler:
            signal.signal(one, handler)
    ours = before["settings of torch"]
    torch.set_num_threads(ours["get_num_threads"])
    torch.use_deterministic_algorithms(ours["are_deterministic_algorithms_enabled"])
    os.umask(before["settings of the process"]["file mode mask"])
    os.chdir(before["settings of the process"]["working directory"])
    if not before["settings of the process"]["filters of all warnings"]:
        warnings.filters[:] = [one for one in warnings.filters if not _is_for_all(one)]  # type: ignore[index]
    logging.getLogger().handlers[:] = to.handlers
    sys.path[:] = to.path


def held_now() -> list[str]:
    """Return the threads and processes this one has started, and the files it has open."""
    own = psutil.Process()
    return [
        *(f"thread {one.name} ({one.ident})" for one in threading.enumerate()),
        *(f"process {one.name()} ({one.pid})" for one in own.children(recursive=True)),
        *(f"open file {one.path} (descriptor {one.fd})" for one in own.open_files()),
    ]


def gained(earlier: list[str], now: list[str]) -> str:
    return ", ".join(one for one in now if one not in earlier)


@dataclass(frozen=True)
class Began:
    """What the process was before its first check: this module is imported ahead of that."""

    told: dict[str, dict[Any, Any]]
    handlers: list[Any]
    path: list[str]

    @classmethod
    def now(cls) -> Began:
        return cls(_process(), list(logging.getLogger().handlers), list(sys.path))


began = Began.now()


@check("backend", "precision", "extension", place="alone")
def errors(lab: Lab) -> str | None:
    """An exception in the user's block passes through unchanged."""
    accelerator = lab.accelerator()
    try:
        with accelerator:
            raise KeyError("of the script")
    except KeyError as error:
        lab.equal(error.args, ("of the script",), "the exception")
    else:
        raise AssertionError("the exception was swallowed")
    return None


@check("backend", "precision", "extension")
def graphs_go(lab: Lab) -> str | None:
    """Nobody keeps the losses of earlier steps, nor with them what backward needed."""
    if lab.kind != "backend":
        some_backend()
    accelerator = lab.accelerator()
    model, optimizer = lab.ready(accelerator)
    seen: list[Any] = []
    for batch in lab.batches(accelerator, 4)[0]:
        loss = loss_of(model, batch)
        seen.append(weakref.ref(loss))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    del loss
    gc.collect()
    kept = [index for index, one in enumerate(seen[:-1]) if one() is not None]
    lab.equal(kept, [], "steps whose loss is still there after later ones")
    return None


@check("backend")
def two_at_once(lab: Lab) -> str | None:
    """Two Accelerators of one process, whose steps alternate, train as each does alone."""
    cycles = (1, 2)
    alone = []
    for cycle in cycles:
        accelerator = lab.accelerator(gradient_accumulation_steps=cycle)
        model, optimizer = lab.ready(accelerator)
        mine, _ = lab.batches(accelerator, 4)
        alone.append(lab.train(accelerator, model, optimizer, mine))
        accelerator.end_training()
    both = [lab.accelerator(gradient_accumulation_steps=cycle) for cycle in cycles]
    objects = [lab.ready(one) for one in both]
    losses: list[list[float]] = [[], []]
    for batch in lab.batches(both[0], 4)[0]:
        for accelerator, (model, optimizer), told in zip(both, objects, losses, strict=True):
            told += lab.train(accelerator, model, optimizer, [batch])
    lab.close(losses, alone, "losses of both, in turn", 1e-6)
    both[1].end_training()
    model, optimizer = objects[0]
    lab.train(both[0], model, optimizer, lab.batches(both[0], 2)[0])
    return None


def _ended(run: Run) -> str:
    """Return what is wrong with how the launch ended."""
    if run.timed_out:
        return "the other rank waited for ever for the one that had failed"
    if run.returncode == 0:
        return "the launch ended well, although a rank had failed"
    if TEXT not in run.stderr + run.stdout:
        return f"what the failed rank said is lost: {run.story[-500:]}"
    if run.left:
        return f"the launch has ended, and processes it started still run: {'; '.join(run.left)}"
    return ""


@check("backend", place="ends", judge=_ended)
def error_on_one_rank(lab: Lab) -> str | None:
    """An exception on one rank ends the whole launch, in time and with its own words."""
    accelerator = lab.accelerator()
    with accelerator:
        model, optimizer = lab.ready(accelerator)
        mine, _ = lab.batches(accelerator, 3)
        lab.train(accelerator, model, optimizer, mine[:1])
        if lab.rank == lab.size - 1:
            raise RuntimeError(TEXT)
        lab.train(accelerator, model, optimizer, mine[1:])
        accelerator.wait_for_everyone()
    return None
