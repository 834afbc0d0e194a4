"""A backend in one process."""

from __future__ import annotations

from accelerate_testing.checks import check
from accelerate_testing.lab import Lab, plain_training


@check("backend", place="alone")
def one_process(lab: Lab) -> str | None:
    """One process trains as plain PyTorch does, saves and loads."""
    accelerator = lab.accelerator()
    lab.equal(accelerator.num_processes, 1, "number of processes")
    lab.equal(accelerator.backend.name, lab.name, "the active backend")
    model, optimizer = lab.ready(accelerator)
    mine, whole = lab.batches(accelerator, 4)
    losses = lab.train(accelerator, model, optimizer, mine)
    if accelerator.backend.supports.get("exact", True):
        expected, weights, _ = plain_training(whole)
        lab.close(losses, expected, "losses")
        lab.close(lab.weights(accelerator, model), weights, "weights")
    trained = lab.weights(accelerator, model)
    path = accelerator.save_state(str(lab.scratch("one_process")))
    lab.train(accelerator, model, optimizer, mine)
    accelerator.load_state(path)
    lab.close(lab.weights(accelerator, model), trained, "weights after load_state", 1e-7)
    return f"{len(mine)} steps"
