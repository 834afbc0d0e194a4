"""What a precision keeps, in one process and around whatever backend takes several."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelerate_testing.checks import Skip, check
from accelerate_testing.lab import Lab, Net, plain_training


def some_backend() -> None:
    """Skip where nothing that is installed takes several processes."""
    from accelerate_core.contract.topology import Topology
    from accelerate_core.plugins.selection import Request, select

    request = Request({}, {}, Topology(0, 2, 0, 2, "as checked"))
    if (error := select("backend", request).error) is not None:
        raise Skip(f"no backend for several processes is installed: {error}")


def _train(lab: Lab, steps: int = 12) -> tuple[Any, Any, Any, list[float]]:
    accelerator = lab.accelerator()
    lab.equal(accelerator.mixed_precision, lab.name, "the active precision")
    model, optimizer = lab.ready(accelerator)
    mine, whole = lab.batches(accelerator, 3)
    losses: list[float] = []
    skipped: list[int] = []
    for index, batch in enumerate((mine * steps)[:steps]):
        losses += lab.train(accelerator, model, optimizer, [batch])
        if accelerator.optimizer_step_was_skipped:
            skipped.append(index)
    lab.alike(accelerator, losses, "losses")
    device = accelerator.device.type
    lab.equal(torch.is_autocast_enabled(device), False, "autocast, outside of the model's forward")
    if len(skipped) > steps // 3:  # a loss scale comes down in the first few
        raise AssertionError(f"the optimizer's steps {skipped} of {steps} were skipped")
    expected, _, _ = plain_training((whole * steps)[:steps], skipped=skipped)
    tolerance = float(lab.options.get("tolerance", 0.2))
    for index, (one, other) in enumerate(zip(losses, expected, strict=True)):
        if not abs(one - other) <= tolerance * max(abs(other), expected[0] / 10):
            raise AssertionError(
                f"loss {index} is {one:.4g}, in full precision {other:.4g}: off by more than "
                f"{tolerance:.0%} (options: tolerance)"
            )
    return accelerator, model, optimizer, losses


@check("precision", place="alone")
def one_process(lab: Lab) -> str | None:
    """One process trains nearly as in full precision."""
    losses = _train(lab)[-1]
    return f"loss {losses[0]:.3g} to {losses[-1]:.3g}"


@check("precision", place="alone")
def names_stay(lab: Lab) -> str | None:
    """Parameters keep names and shapes, and what is tied stays tied: optimizers and checkpoints find them."""
    accelerator = lab.accelerator()
    model, _ = lab.ready(accelerator)
    inner = accelerator.unwrap_model(model)
    lab.equal(
        {name: tuple(p.shape) for name, p in inner.named_parameters()},
        {name: tuple(p.shape) for name, p in Net(0).named_parameters()},
        "parameters",
    )
    tied = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    tied[1].weight = tied[0].weight
    inner = accelerator.unwrap_model(accelerator.prepare_model(tied))
    lab.equal(
        [name for name, _ in inner.named_parameters()], ["0.weight"], "parameters of a tied model"
    )
    return None


@check("precision", place="alone")
def modes_stay(lab: Lab) -> str | None:
    """What is frozen stays frozen, what trains still trains, and neither mode of a model is changed."""
    accelerator = lab.accelerator()
    for training in (True, False):
        model = Net(0).train(training)
        model.inner.requires_grad_(False)
        its = {name: p.requires_grad for name, p in model.named_parameters()}
        inner = accelerator.unwrap_model(accelerator.prepare_model(model))
        mode = "train" if training else "eval"
        lab.equal(
            {name: p.requires_grad for name, p in inner.named_parameters()},
            its,
            f"parameters of a model in {mode} mode that want gradients",
        )
        modes = {module.training for module in inner.modules()}
        lab.equal(modes, {training}, f"training, of the modules of a model in {mode} mode")
    return None


@check("precision", place="alone")
def save_and_load(lab: Lab) -> str | None:
    """A checkpoint brings back what it takes to go on alike."""
    accelerator, model, optimizer, _ = _train(lab)
    path = accelerator.save_state(str(lab.scratch("precision")))
    mine, _ = lab.batches(accelerator, 3)
    losses = lab.train(accelerator, model, optimizer, mine)
    accelerator.load_state(path)
    again = lab.train(accelerator, model, optimizer, mine)
    lab.close(again, losses, "losses after load_state", 1e-6)
    return None


@check("precision", place="alone")
def evaluation(lab: Lab) -> str | None:
    """A model for evaluation gives finite outputs in float32, or wider."""
    accelerator = lab.accelerator()
    model = accelerator.prepare_model(Net(0), evaluation_mode=True)
    with torch.no_grad():
        out = model(torch.ones(2, 6, device=accelerator.device))
    lab.equal(
        out.dtype in (torch.float32, torch.float64), True, f"outputs are float32, not {out.dtype}"
    )
    lab.equal(bool(out.isfinite().all()), True, "the output is finite")
    return None


@check("precision")
def two_processes(lab: Lab) -> str | None:
    """Two processes train nearly as in full precision, and end with the same model."""
    some_backend()
    accelerator, model, _, losses = _train(lab)
    lab.same_everywhere(accelerator, model, "the trained model")
    lab.weights(accelerator, model)
    return f"{accelerator.backend.name}, loss {losses[0]:.3g} to {losses[-1]:.3g}"
