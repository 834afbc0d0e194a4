"""The end of a run: normally, repeatedly, and by an error."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import warnings
import weakref
from typing import Any

import torch

from accelerate_testing.checks import changed, check
from accelerate_testing.context import CheckContext, raised
from accelerate_testing.processes import CompletedRun
from accelerate_testing.suites.leaving import Lives
from accelerate_testing.training import Trainer, loss_of

TEXT = "the data of this rank cannot be read"
_OF_TORCH = (
    "get_num_threads", "are_deterministic_algorithms_enabled", "get_default_dtype", "is_grad_enabled",
    "is_inference_mode_enabled",
)  # fmt: skip


@check("backend", "precision", "extension", hooks="on_start on_end on_free check prepare_model")
def once_more(ctx: CheckContext) -> None:
    """After `end_training` nothing is left, and a second Accelerator trains like the first."""
    seen = []
    lives = Lives(ctx, measure=2)
    began.restore()  # leftovers of earlier checks would hide new ones
    for turn in range(3):
        with lives.one():
            losses, model = _life(ctx, turn)
        seen.append(losses)
        ctx.equal(model() is None, True, "the model is freed")
        if turn == 0:
            began.restore()  # a library may change something when it is first used
        for what, now in _process().items():
            ctx.equal(changed(now, began.told[what]), [], f"{what} that have changed")
    for turn in (1, 2):
        ctx.close(seen[turn], seen[0], "losses of a later Accelerator", 1e-6)
    lives.check()


def _life(ctx: CheckContext, turn: int) -> tuple[list[float], Any]:
    """Train, save and end; return the losses and a weak reference to the user's model."""
    trainer = Trainer.begin(ctx)
    accelerator = trainer.accelerator
    losses = trainer.train(trainer.batches(3)[0])
    accelerator.save_state(str(ctx.scratch(f"once_more_{turn}")))
    if turn == 2:
        accelerator.free_memory()
    accelerator.end_training()
    accelerator.end_training()  # a second call does nothing
    ctx.equal(torch.distributed.is_initialized(), False, "the process group still exists")
    return losses, weakref.ref(accelerator.unwrap_model(trainer.model))


def _process() -> dict[str, dict[Any, Any]]:
    """Return the state of the process that a plugin must not change."""
    return {
        "variables of the environment": dict(os.environ),
        "signal handlers": {one: signal.getsignal(one) for one in signal.valid_signals()},
        "settings of torch": {
            **{name: getattr(torch, name)() for name in _OF_TORCH},
            "is_autocast_enabled": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        },
        "settings of the process": {
            "working directory": os.getcwd(),
            "sys.path": list(sys.path),
            "file mode mask": _umask(),
            # A library may add filters for particular warnings.
            "filters of all warnings": [f[0] for f in warnings.filters if _is_for_all(f)],
            "number of handlers of the root logger": len(logging.getLogger().handlers),
        },
    }


def _is_for_all(warnings_filter: Any) -> bool:
    return tuple(warnings_filter[1:4]) == (None, Warning, None)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class Began:
    """The state of the process before its first check; this module is imported before that."""

    def __init__(self) -> None:
        self.told = _process()
        self.handlers = list(logging.getLogger().handlers)

    def restore(self) -> None:
        """Restore the state of the process."""
        os.environ.clear()
        os.environ.update(self.told["variables of the environment"])
        for one, handler in self.told["signal handlers"].items():
            if signal.getsignal(one) != handler:
                signal.signal(one, handler)
        ours, process = self.told["settings of torch"], self.told["settings of the process"]
        torch.set_num_threads(ours["get_num_threads"])
        torch.use_deterministic_algorithms(ours["are_deterministic_algorithms_enabled"])
        os.umask(process["file mode mask"])
        os.chdir(process["working directory"])
        if not process["filters of all warnings"]:
            warnings.filters[:] = [one for one in warnings.filters if not _is_for_all(one)]  # type: ignore[index]
        logging.getLogger().handlers[:] = self.handlers
        sys.path[:] = process["sys.path"]


began = Began()


@check("backend", "precision", "extension", alone=True, hooks="on_error")
def errors(ctx: CheckContext) -> None:
    """An exception in the user's `with` block is not changed."""
    script_raises(ctx, ctx.accelerator())


def script_raises(ctx: CheckContext, accelerator: Any) -> None:
    """End the run with an error of the script, and fail if the error is changed."""

    def script() -> None:
        with accelerator:
            raise KeyError("of the script")

    told = raised(KeyError, script)
    assert told, "the exception was swallowed"
    ctx.equal(told.args, ("of the script",), "the exception")


@check(
    "backend", "precision", "extension",
    hooks="prepare prepare_model backward optimizer_step zero_grad on_step_end",
)  # fmt: skip
def graphs_go(ctx: CheckContext) -> None:
    """The losses of earlier steps are freed, and with them what backward needed."""
    trainer = Trainer.begin(ctx)
    seen: list[Any] = []
    for batch in trainer.batches(4)[0]:
        loss = loss_of(trainer.model, batch)
        seen.append(weakref.ref(loss))
        trainer.step(loss)
    del loss
    gc.collect()
    kept = [index for index, one in enumerate(seen[:-1]) if one() is not None]
    ctx.equal(kept, [], "steps whose loss is still kept after later steps")


@check("backend", hooks="on_start on_end")
def two_at_once(ctx: CheckContext) -> None:
    """Two Accelerators in one process, with alternating steps, train as each does alone."""
    cycles = (1, 2)
    alone = []
    for cycle in cycles:
        trainer = Trainer.begin(ctx, gradient_accumulation_steps=cycle)
        alone.append(trainer.train(trainer.batches(4)[0]))
        trainer.accelerator.end_training()
    made = [ctx.accelerator(gradient_accumulation_steps=cycle) for cycle in cycles]
    both = [Trainer.begin(ctx, accelerator=one) for one in made]
    first, second = both
    losses: list[list[float]] = [[], []]
    for batch in first.batches(4)[0]:
        for trainer, told in zip(both, losses, strict=True):
            told += trainer.train([batch])
    ctx.close(losses, alone, "losses of both in alternation", 1e-6)
    second.accelerator.end_training()
    first.train(first.batches(2)[0])


def _ended(run: CompletedRun) -> str:
    """Return what is wrong with how the launch ended, "" if nothing is."""
    if run.timed_out:
        return "the other rank waited forever for the failed rank"
    if run.returncode == 0:
        return "the launch succeeded, although a rank had failed"
    if TEXT not in run.stderr + run.stdout:
        return f"the error of the failed rank is not shown: {run.story[-500:]}"
    if run.left:
        return (
            f"the launch has ended, but processes that it started still run: {'; '.join(run.left)}"
        )
    return ""


@check("backend", judge=_ended, hooks="on_start on_error on_end")
def error_on_one_rank(ctx: CheckContext) -> None:
    """An exception on one rank ends the whole launch in time, and is shown."""
    trainer = Trainer.begin(ctx)
    with trainer.accelerator:
        mine, _ = trainer.batches(3)
        trainer.train(mine[:1])
        if ctx.rank == ctx.size - 1:
            raise RuntimeError(TEXT)
        trainer.train(mine[1:])
        trainer.accelerator.wait_for_everyone()
