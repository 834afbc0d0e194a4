"""What a precision must do, in one process and on ranks with the installed backend."""

from __future__ import annotations

import torch
from torch import nn

from accelerate_testing.checks import SAVE, check
from accelerate_testing.context import CheckContext
from accelerate_testing.suites.preparing import goes_on, pair
from accelerate_testing.training import Net, Trainer, adam, optimizer_of, plain_training


def _train(ctx: CheckContext, steps: int = 12) -> tuple[Trainer, list[float]]:
    trainer = Trainer.begin(ctx)
    accelerator = trainer.accelerator
    ctx.equal(accelerator.mixed_precision, ctx.name, "the active precision")
    mine, whole = trainer.batches(3)
    losses: list[float] = []
    skipped: list[int] = []
    for index, batch in enumerate((mine * steps)[:steps]):
        losses += trainer.train([batch])
        if accelerator.optimizer_step_was_skipped:
            skipped.append(index)
    ctx.alike(accelerator, losses, "losses")
    autocast = torch.is_autocast_enabled(accelerator.device.type)
    ctx.equal(autocast, False, "autocast outside the model's forward")
    # A loss scale may be too high in the first steps.
    said = f"the optimizer skipped the steps {skipped} of {steps}"
    assert len(skipped) <= steps // 3, said
    batches = (whole * steps)[:steps]
    optimizer = optimizer_of(ctx)
    expected, _, _ = plain_training(batches, optimizer=optimizer, skipped=skipped)
    tolerance = float(ctx.options.get("tolerance", 0.2))
    for index, (one, other) in enumerate(zip(losses, expected, strict=True)):
        assert abs(one - other) <= tolerance * max(abs(other), expected[0] / 10), (
            f"loss {index} is {one:.4g}, but {other:.4g} in full precision: it differs by more than "
            f"{tolerance:.0%} (option: tolerance)"
        )
    return trainer, losses


@check("precision", alone=True, hooks="convert autocast scaler on_start on_step_end")
def one_process(ctx: CheckContext) -> str:
    """One process trains nearly as in full precision."""
    _, losses = _train(ctx)
    return f"loss {losses[0]:.3g} to {losses[-1]:.3g}"


def _inner(ctx: CheckContext, net: nn.Module) -> nn.Module:
    """Return the inner model after preparing it with an optimizer."""
    trainer = Trainer.begin(ctx, net=net)
    inner: nn.Module = trainer.accelerator.unwrap_model(trainer.model)
    trainer.accelerator.end_training()
    return inner


@check("precision", alone=True, hooks="convert")
def names_stay(ctx: CheckContext) -> None:
    """Parameters keep their names, shapes and dtypes, and tied ones stay tied."""
    trainer = Trainer.begin(ctx)
    accelerator = trainer.accelerator
    inner = accelerator.unwrap_model(trainer.model)
    shapes, its = (
        {name: tuple(p.shape) for name, p in one.named_parameters()} for one in (inner, Net(0))
    )
    ctx.equal(shapes, its, "parameters")
    tied = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    tied[1].weight = tied[0].weight
    accelerator.end_training()
    inner = _inner(ctx, tied)
    names = [name for name, _ in inner.named_parameters()]
    ctx.equal(names, ["0.weight"], "parameters of a tied model")
    # An engine that owns the precision may cast parameters itself.
    if not {"parameters", "precision"} & {*accelerator.precision.needs, *accelerator.backend.owns}:
        for dtype in (torch.bfloat16, torch.float64):
            inner = _inner(ctx, Net(0).to(dtype))
            dtypes = {p.dtype for p in inner.parameters()}
            ctx.equal(dtypes, {dtype}, "dtypes of parameters (its `needs` don't have 'parameters')")


@check("precision", alone=True, hooks="convert")
def modes_stay(ctx: CheckContext) -> None:
    """Frozen parameters stay frozen, others stay trainable, and the model keeps its train or eval mode."""
    for training in (True, False):
        model = Net(0).train(training)
        model.inner.requires_grad_(False)
        its = {name: p.requires_grad for name, p in model.named_parameters()}
        inner = _inner(ctx, model)
        mode = f"a model in {'train' if training else 'eval'} mode"
        now = {name: p.requires_grad for name, p in inner.named_parameters()}
        ctx.equal(now, its, f"requires_grad of the parameters of {mode}")
        modes = {module.training for module in inner.modules()}
        ctx.equal(modes, {training}, f"training of the modules of {mode}")


@check("precision", alone=True, hooks=SAVE)
def save_and_load(ctx: CheckContext) -> None:
    """Another Accelerator loads a checkpoint of several models and continues exactly."""
    if ctx.options.get("one_model", False):
        _one_goes_on(ctx)
        return
    both = pair(ctx, 0)
    batches, _ = both[0].batches(3)
    for trainer in both:
        trainer.train(batches * 4)  # until a loss scale fits
    goes_on(ctx, both, batches, "precision")


def _one_goes_on(ctx: CheckContext) -> None:
    """The same with one model, for precisions that can train only one."""
    first = Trainer.begin(ctx, adam)
    batches, _ = first.batches(3)
    first.train(batches * 4)
    path = first.accelerator.save_state(str(ctx.scratch("precision")))
    first.train(batches)
    after = first.weights()
    first.accelerator.end_training()
    again = Trainer.begin(ctx, adam, seed=5)
    again.accelerator.load_state(path)
    again.train(batches)
    ctx.close(again.weights(), after, "the model some steps after load_state", 1e-6)


@check("precision", alone=True, hooks="convert autocast")
def evaluation(ctx: CheckContext) -> None:
    """A model for evaluation returns finite outputs in float32 or float64."""
    accelerator = ctx.accelerator()
    model = accelerator.prepare_model(Net(0), evaluation_mode=True)
    with torch.no_grad():
        out = model(torch.ones(2, 6, device=accelerator.device))
    wide = out.dtype in (torch.float32, torch.float64)
    ctx.equal(wide, True, f"outputs are float32, not {out.dtype}")
    ctx.equal(bool(out.isfinite().all()), True, "the output is finite")


@check("precision", hooks="convert autocast scaler on_start on_step_end")
def two_processes(ctx: CheckContext) -> str:
    """Two processes train nearly as in full precision and end with the same model."""
    trainer, losses = _train(ctx)
    trainer.model.eval()  # while training, a rank may scale by its own samples
    trainer.same_everywhere("the trained model in evaluation mode")
    trainer.model.train()
    trainer.weights()
    return f"{trainer.accelerator.backend.name}, loss {losses[0]:.3g} to {losses[-1]:.3g}"
