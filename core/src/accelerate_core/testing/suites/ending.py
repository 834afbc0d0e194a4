"""The end of a run: as it should be, once more, and by an error."""

from __future__ import annotations

import threading

import torch

from accelerate_core.testing.checks import check
from accelerate_core.testing.lab import Lab
from accelerate_core.testing.processes import Run

TEXT = "the data of this rank cannot be read"


@check("backend")
def once_more(lab: Lab) -> str | None:
    """After `end_training` nothing is left, and a second Accelerator trains as the first did."""
    seen = []
    threads = threading.active_count()
    for _ in range(2):
        accelerator = lab.accelerator()
        model, optimizer = lab.ready(accelerator)
        mine, _ = lab.batches(accelerator, 3)
        seen.append(lab.train(accelerator, model, optimizer, mine))
        accelerator.end_training()
        accelerator.end_training()  # a second time it does nothing
        lab.equal(torch.distributed.is_initialized(), False, "a process group still runs")
    lab.close(seen[1], seen[0], "losses of the second Accelerator", 1e-6)
    lab.equal(threading.active_count() <= threads, True, "no thread is left")
    return None


@check("backend")
def two_at_once(lab: Lab) -> str | None:
    """Two Accelerators of one process do not disturb each other."""
    first, second = lab.accelerator(), lab.accelerator(gradient_accumulation_steps=2)
    results = []
    trained = [(one, *lab.ready(one)) for one in (first, second)]
    for accelerator, model, optimizer in trained:
        mine, _ = lab.batches(accelerator, 2)
        results.append(lab.train(accelerator, model, optimizer, mine))
    second.end_training()
    accelerator, model, optimizer = trained[0]
    lab.train(accelerator, model, optimizer, lab.batches(first, 2)[0])
    lab.close(results[0][0], results[1][0], "first losses of both")
    return None


def _ended(run: Run) -> str:
    """Return what is wrong with how the launch ended."""
    if run.timed_out:
        return "the other rank waited for ever for the one that had failed"
    if run.returncode == 0:
        return "the launch ended well, although a rank had failed"
    if TEXT not in run.stderr + run.stdout:
        return f"what the failed rank said is lost: {run.story[-500:]}"
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
