"""The training step of a backend, compared with plain PyTorch on the batches of all ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from accelerate_core.backend.precision import BFloat16, Float16, Precision
from accelerate_core.config.handlers import AutocastKwargs, GradScalerKwargs
from accelerate_core.contract.capabilities import lacking
from accelerate_core.plugin import AccelerateError, ConfigurationError, listing
from accelerate_testing.checks import STEP, check
from accelerate_testing.context import CheckContext, raised
from accelerate_testing.counting import count_communication
from accelerate_testing.training import (
    BATCH,
    Batch,
    Net,
    Trainer,
    local_gradients,
    loss_of,
    no_momentum,
    plain_training,
    sgd,
)

#: Steps in which the ranks must have learned from each other; for an exact backend the first of these.
_MEET = (4, 16, 256)


@check("backend", hooks=f"prepare_model {STEP}")
def training(ctx: CheckContext) -> str:
    """Losses and weights of six steps equal those of one process on the whole batches."""
    trainer = Trainer.begin(ctx)
    if not trainer.exact:
        _, whole = trainer.batches(6)
        device = trainer.accelerator.device
        trainer.train([(x[:BATCH].to(device), y[:BATCH].to(device)) for x, y in whole])
        trainer.same_everywhere("the model, trained on the same samples on all ranks")
        return "not exact: ranks with the same samples stay equal"
    losses, _ = trainer.train_as_plain(6)
    ctx.alike(trainer.accelerator, losses, "losses")
    trainer.same_everywhere("the trained model")
    return f"6 steps, last loss {losses[-1]:.4f}"


@check("backend", hooks=f"prepare_model {STEP}")
def learning(ctx: CheckContext) -> str:
    """Thirty steps reduce the loss, and what a rank learns reaches the others."""
    trainer = Trainer.begin(ctx)
    accelerator = trainer.accelerator
    losses = trainer.train(trainer.batches(3)[0] * 10)
    ctx.alike(accelerator, losses, "losses")
    first, last = sum(losses[:3]), sum(losses[-3:])
    line = f"{first / 3:.3g} to {last / 3:.3g}"
    assert last < 0.8 * first, f"the loss went from {line}"  # how fast depends on the algorithm
    _, shares = accelerator.hooks.data_shard()
    accelerator.end_training()
    if shares == 1:  # all ranks work on the same samples
        return f"loss {line}"
    return f"loss {line}; what a rank learns reaches the others in step {_reaches_others(ctx)}"


def _reaches_others(ctx: CheckContext) -> int:
    """Train twice, once with other targets on one rank; return the step in which all others show it.

    The targets change on the last rank and then on the main one, because averaging may work in one
    direction only.
    """
    for count in _MEET[:1] if ctx.supports.get("exact", True) else _MEET:
        unheard, latest = _heard(ctx, count)
        if not unheard:
            return latest
    raise AssertionError(
        f"after {count} steps, {unheard}: the ranks train separately. If they synchronise less often, "
        "set that for the checks with the backend's settings."
    )


def _heard(ctx: CheckContext, count: int) -> tuple[str, int]:
    """Return which rank learns nothing from another one, "" if none, and the step in which all have."""
    usual = _outputs(ctx, count, -1)
    latest = 0
    for rank in (ctx.size - 1, 0):
        disturbed = _outputs(ctx, count, rank)
        for other in {*range(ctx.size)} - {rank}:
            both = zip(usual[other], disturbed[other], strict=True)
            heard = [step for step, (one, its) in enumerate(both, 1) if not torch.equal(one, its)]
            if not heard:
                return f"rank {other} does not depend on what rank {rank} learned", latest
            latest = max(latest, heard[0])
    return "", latest


def _outputs(ctx: CheckContext, count: int, disturbed: int) -> list[list[torch.Tensor]]:
    """Train with other targets on one rank; return the outputs of every rank's model after each step."""
    trainer = Trainer.begin(ctx)
    accelerator = trainer.accelerator
    ((x, y),), _ = trainer.batches(1)
    y = y + 5.0 * (accelerator.process_index == disturbed)
    told = []
    for _ in range(count):
        trainer.step(loss_of(trainer.model, (x, y)))
        with torch.no_grad():
            probe = torch.ones(1, 6, device=accelerator.device)
            told.append(trainer.model(probe).float().cpu())
    every = accelerator.communicator.gather_object(told)
    accelerator.end_training()
    return list(every)


@check("backend", needs="gradients", hooks="backward clip_grad")
def gradients_meet(ctx: CheckContext) -> str:
    """All ranks have the same gradients at the time that `reduces_gradients` declares."""
    accelerator = ctx.accelerator()
    if ctx.supports.get("gradients", True) is not True:
        ctx.skip("gradients are in buffers of the backend")
    said = accelerator.backend.reduces_gradients
    when = {"backward": "after backward", "step": "after clipping"}.get(said or "")
    if when is None:
        ctx.skip(f"it declares reduces_gradients={said!r}")
    trainer = Trainer.begin(ctx, accelerator=accelerator)
    accelerator.backward(loss_of(trainer.model, trainer.batches(1)[0][0]))
    parameters = list(trainer.model.parameters())
    if said == "step":
        accelerator.clip_grad_norm_(parameters, 1e9)
    if any(hasattr(parameter.grad, "placements") for parameter in parameters):
        ctx.skip("gradients are sharded: each rank has a different part")
    gradients = [None if p.grad is None else p.grad.tolist() for p in parameters]
    ctx.alike(accelerator, gradients, f"gradients {when}")
    return when


@check("backend", needs="gradients", hooks="backward follow_trainable")
def parameters_unfrozen_later(ctx: CheckContext) -> str:
    """Parameters that are unfrozen after `prepare` are trained alike on all ranks, or refused by name."""
    accelerator = ctx.accelerator()
    if accelerator.backend.reduces_gradients == "never":
        ctx.skip("it declares reduces_gradients='never'")
    net = Net(accelerator.process_index)
    name, late = next(iter(net.named_parameters()))
    late.requires_grad_(False)
    trainer = Trainer.begin(ctx, net=net, accelerator=accelerator)
    mine, _ = trainer.batches(3)
    trainer.train(mine[:1])
    inner = accelerator.unwrap_model(trainer.model)
    dict(inner.named_parameters())[name].requires_grad_(True)
    error = raised(ConfigurationError, lambda: trainer.train(mine[1:]))
    if error is not None:
        ctx.equal(name in str(error), True, f"the error names {name!r}: {error}")
        return "refused"
    trainer.same_everywhere("the model with a parameter that was unfrozen after prepare")
    return "trained"


class _Fails(torch.autograd.Function):
    """Passes a loss on, and cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ArithmeticError(_NO_BACKWARD)


_NO_BACKWARD = "this loss cannot be differentiated"


@check("backend", hooks="backward")
def backward_errors(ctx: CheckContext) -> None:
    """An exception in backward reaches the script."""
    trainer = Trainer.begin(ctx)
    apply: Any = _Fails.apply
    loss = apply(loss_of(trainer.model, trainer.batches(1)[0][0]))
    error = raised(Exception, lambda: trainer.accelerator.backward(loss))
    assert error is not None, "backward returned, although an exception was raised in it"
    ctx.equal(_NO_BACKWARD in str(error), True, f"the exception of the script: {error}")


@check("backend", hooks=STEP)
def accumulation(ctx: CheckContext) -> str:
    """Two micro-batches of any sizes give the same step as one large batch, even at the end of an epoch."""
    trainer = Trainer.begin(ctx, gradient_accumulation_steps=2)
    backend = trainer.accelerator.backend
    start = trainer.weights()
    fixed = trainer.accelerator.hooks.fixed_batch()
    mine, whole = trainer.batches(6, BATCH, BATCH if fixed else BATCH - 1)
    trainer.train(mine[:1])
    ctx.close(trainer.weights(), start, "weights inside the first cycle", 0.0)
    trainer.train(mine[1:])
    if not _reduces_sums(trainer):
        return "not exact: no step inside a cycle"
    got = trainer.weights()
    ctx.close(
        got,
        trainer.reference(mine, whole, 2),
        "weights, with a smaller second micro-batch",
    )
    trainer.accelerator.end_training()
    if "accumulation" in backend.owns:
        return "3 steps of 2 micro-batches"
    ctx.end()
    trainer = Trainer.begin(ctx, gradient_accumulation_steps=2)
    mine, whole = trainer.batches(3)
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*whole, strict=True)))
    loader = trainer.accelerator.prepare(DataLoader(data, batch_size=BATCH))
    for _ in range(2):
        trainer.train(loader)
    got = trainer.weights()
    expected = trainer.reference(mine * 2, whole * 2, 2, 3)
    ctx.close(got, expected, "weights after epochs of 3 micro-batches")
    return "3 steps of 2 micro-batches, and epochs of 3"


@check("backend", hooks=STEP)
def early_zero_grad(ctx: CheckContext) -> str:
    """`zero_grad` before backward keeps a cycle's gradients, and after backward discards them."""
    trainer = Trainer.begin(ctx, gradient_accumulation_steps=2)
    mine, whole = trainer.batches(6)
    discarded = 3  # the last micro-batch of the second cycle
    for index, batch in enumerate(mine):
        with trainer.accelerator.accumulate(trainer.model):
            trainer.optimizer.zero_grad()
            trainer.accelerator.backward(loss_of(trainer.model, batch))
            if index == discarded:
                trainer.optimizer.zero_grad()
            else:
                trainer.optimizer.step()
    if not _reduces_sums(trainer):
        return "not exact: no step fails"
    weights = trainer.weights()
    kept = (0, 1, 4, 5)
    expected = trainer.reference([mine[one] for one in kept], [whole[one] for one in kept], 2)
    ctx.close(weights, expected, "weights")
    return "2 steps of 2 micro-batches, and a cycle that is discarded"


def _reduces_sums(trainer: Trainer) -> bool:
    """Return whether ranks reduce the sum of a cycle's gradients, and not those of each micro-batch."""
    backend = trainer.accelerator.backend
    each = backend.reduces_gradients == "backward" and not backend.supports.get("no_sync")
    return trainer.exact or not each


class Branches(nn.Module):
    """Two parts of the same size, one of which each forward uses, and a third that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 1) for _ in range(3))

    def forward(self, x: torch.Tensor, which: int) -> Any:
        """Samples [batch, 6] in, numbers [batch, 1] out."""
        return self.parts[which](x)


@check("backend", hooks="backward")
def branches(ctx: CheckContext) -> str | None:
    """If ranks use different parts of a model, all ranks train all parts, or all ranks raise an error."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        expected = Branches()
    trainer = Trainer.begin(ctx, no_momentum, net=copy.deepcopy(expected))
    accelerator = trainer.accelerator
    index, count = accelerator.hooks.data_shard()
    mine, whole = trainer.batches(3)
    refused = ""
    try:
        for x, y in mine:  # some backends notice it one step later
            trainer.step(nn.functional.mse_loss(trainer.model(x, index % 2).float(), y))
    except Exception as error:
        refused = f"{type(error).__name__}: {str(error).strip().partition('. ')[0]}"
    told = accelerator.communicator.gather_object(refused)
    if all(told):
        return f"refused: {refused}"
    assert not any(told), f"some ranks raised an error and others did not: {told}"
    if not trainer.exact:
        return "not exact: no rank refuses"
    plain = no_momentum(expected.parameters())
    for x, y in whole:
        parts = zip(torch.split(x, BATCH), torch.split(y, BATCH), strict=True)
        for rank, (inputs, targets) in enumerate(parts):
            loss = nn.functional.mse_loss(expected(inputs, rank % 2), targets) / count
            torch.autograd.backward(loss)
        plain.step()
        plain.zero_grad()
    with torch.no_grad():
        x = torch.ones(BATCH, 6, device=accelerator.device)
        sums = [round(float(trainer.model(x, which).float().sum()), 4) for which in range(3)]
    ctx.alike(accelerator, sums, "the output of each part")
    try:
        ctx.close(trainer.weights(), dict(expected.state_dict()), "weights")
    except AssertionError as error:
        return f"equal on all ranks, but not the result of mean gradients: {error}"
    return None


@check("backend", needs="num_items", hooks="scale_gradients loss_shard backward")
def counted_items(ctx: CheckContext) -> str:
    """`accumulate(num_items=...)` over micro-batches of different sizes gives the mean over all items."""
    trainer = Trainer.begin(ctx, gradient_accumulation_steps=2)
    accelerator = trainer.accelerator
    mine, whole = trainer.batches(2)
    index, count = accelerator.hooks.data_shard()

    def lengths(rank: int) -> list[int]:
        return [BATCH - rank % 2, 1 + rank % 2]

    if not trainer.exact:
        return _split_differently(trainer, mine)
    _count(trainer, [(x[:n], y[:n]) for (x, y), n in zip(mine, lengths(index), strict=True)])
    expected = Net(0)
    plain = sgd(expected.parameters())
    parts = [
        (x[r * BATCH : r * BATCH + lengths(r)[step]], y[r * BATCH : r * BATCH + lengths(r)[step]])
        for step, (x, y) in enumerate(whole)
        for r in range(count)
    ]
    joined = (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
    torch.autograd.backward(loss_of(expected, joined))
    plain.step()
    ctx.close(trainer.weights(), dict(expected.state_dict()), "weights")
    return f"{len(joined[0])} items"


def _count(trainer: Trainer, batches: Sequence[Batch]) -> None:
    """Train on sums of losses, with the number of their items."""
    for x, y in batches:
        with trainer.accelerator.accumulate(trainer.model, num_items=len(x)):
            trainer.step(nn.functional.mse_loss(trainer.model(x), y, reduction="sum"))


def _split_differently(trainer: Trainer, mine: Sequence[Batch]) -> str:
    """How items are split into micro-batches makes no difference, even if the backend is not exact."""
    if not _reduces_sums(trainer):
        trainer.ctx.skip("it is not exact, and reduces the gradients of each micro-batch")
    ctx, seen = trainer.ctx, []
    xs, ys = (torch.cat(parts) for parts in zip(*mine, strict=True))
    for first in (BATCH, 1):
        ctx.end()
        trainer = Trainer.begin(ctx, gradient_accumulation_steps=2)
        _count(trainer, [(xs[:first], ys[:first]), (xs[first:], ys[first:])])
        seen.append(trainer.weights())
    what = f"weights after {BATCH} and {BATCH} items, and after 1 and {2 * BATCH - 1}"
    ctx.close(seen[0], seen[1], what)
    return "not exact: the same items, split in two ways"


@check("backend", needs="no_sync", hooks="no_sync backward")
def no_sync(ctx: CheckContext) -> None:
    """A backward under `no_sync` reduces nothing, and the next one outside reduces all gradients."""
    trainer = Trainer.begin(ctx)
    accelerator, model = trainer.accelerator, trainer.model
    mine, whole = trainer.batches(2)
    with accelerator.no_sync(model), count_communication() as said:
        accelerator.backward(loss_of(model, mine[0]) / 2)
    ctx.equal(said.reductions, 0, f"reductions under no_sync ({dict(said.calls)})")
    trainer.step(loss_of(model, mine[1]) / 2)
    if not trainer.exact:
        return
    ctx.close(trainer.weights(), plain_training(whole, per_step=2)[1], "weights")
    with suppress(KeyError), accelerator.no_sync(model):
        raise KeyError("of the script")
    accelerator.backward(loss_of(model, mine[0]))
    trainer.optimizer.step()
    trainer.same_everywhere("the model after an exception inside no_sync")


@check("backend", hooks="clip_grad")
def clip_norm(ctx: CheckContext) -> str:
    """Clipping uses the norm of the gradients of all ranks together, and returns the norm from before."""
    trainer = Trainer.begin(ctx)
    accelerator, model = trainer.accelerator, trainer.model
    norms: list[float] = []
    if not trainer.exact:
        return _bounds_norm(trainer, 0.01)

    def clip() -> None:
        norm: Any = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        ctx.equal((type(norm).__name__, norm.ndim), ("Tensor", 0), "what clip_grad_norm_ returns")
        norms.append(float(norm))

    _, expected = trainer.train_as_plain(3, clip, max_norm=0.5)
    ctx.close(norms, expected, "norms before clipping", 1e-4)
    mine, whole = trainer.batches(1)
    line = f"norms {', '.join(f'{norm:.2f}' for norm in norms)}"
    for kind in (math.inf, 1.0):
        probe = Net(0)
        probe.load_state_dict(trainer.weights())
        torch.autograd.backward(loss_of(probe, whole[0]))
        other = float(nn.utils.clip_grad_norm_(probe.parameters(), math.inf, kind))
        accelerator.backward(loss_of(model, mine[0]))
        try:
            told = float(accelerator.clip_grad_norm_(model.parameters(), 0.5, kind))
        except ConfigurationError:  # the backend refuses it
            return f"{line}; the 2-norm only"
        ctx.close([told / other], [1.0], f"norm_type={kind}, as a fraction of the right one", 1e-4)
        trainer.optimizer.zero_grad()
    return line


@check("backend", hooks="clip_grad")
def small_gradients(ctx: CheckContext) -> None:
    """Clipping does not change gradients below the limit."""
    trainer = Trainer.begin(ctx)
    accelerator, model = trainer.accelerator, trainer.model

    def clip() -> None:
        accelerator.clip_grad_norm_(model.parameters(), 1e3)
        if "optimizer" not in accelerator.backend.owns:
            accelerator.clip_grad_value_(model.parameters(), 1e3)

    mine, whole = trainer.batches(3)
    trainer.train(mine, clip)
    got = trainer.weights()
    ctx.close(got, trainer.reference(mine, whole), "weights")


@check("backend", hooks="clip_grad")
def clip_value(ctx: CheckContext) -> str | None:
    """Clipping by value limits each element of the reduced gradients."""
    trainer = Trainer.begin(ctx)
    if not trainer.exact:
        return _bounds_values(trainer, 0.001)
    clip = trainer.accelerator.clip_grad_value_
    trainer.train_as_plain(3, lambda: clip(trainer.model.parameters(), 0.1), clip_value=0.1)
    return None


def _bounds_norm(trainer: Trainer, limit: float) -> str:
    """Clipping respects the limit of the norm, and returns the norm from before."""
    parameters = _with_gradients(trainer)
    norm: Any = trainer.accelerator.clip_grad_norm_(parameters, limit)
    kind = type(norm).__name__, norm.ndim
    trainer.ctx.equal(kind, ("Tensor", 0), "what clip_grad_norm_ returns")
    left = float(torch.stack([grad.norm() for grad in local_gradients(parameters)]).norm())
    line = (
        f"the norm is {left:.3g} after clipping to {limit} (before, it returned {float(norm):.3g})"
    )
    assert left <= 1.01 * limit < float(norm), line
    return f"not exact: {line}"


def _bounds_values(trainer: Trainer, limit: float) -> str:
    """Clipping respects the limit of each element."""
    parameters = _with_gradients(trainer)
    trainer.accelerator.clip_grad_value_(parameters, limit)
    left = max(float(grad.abs().max()) for grad in local_gradients(parameters) if grad.numel())
    line = f"the largest gradient is {left:.3g} after clipping to {limit}"
    assert left <= 1.01 * limit, line
    return f"not exact: {line}"


def _with_gradients(trainer: Trainer) -> list[nn.Parameter]:
    if "optimizer" in trainer.accelerator.backend.owns:
        trainer.ctx.skip("it is not exact, and its engine owns the gradients")
    trainer.accelerator.backward(loss_of(trainer.model, trainer.batches(1)[0][0]))
    return list(trainer.model.parameters())


@check("backend", hooks="optimizer_step prepare_scheduler")
def schedule(ctx: CheckContext) -> None:
    """A scheduler moves with the steps that the optimizer takes, in the same way on all ranks."""
    slow = partial(torch.optim.SGD, lr=1e-3)
    halving = partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)
    trainer = Trainer.begin(ctx, slow, schedule=halving, gradient_accumulation_steps=2)
    accelerator = trainer.accelerator
    _, count = accelerator.hooks.data_shard()
    trainer.train(trainer.batches(4)[0])
    ctx.equal(accelerator.optimizer_step_was_skipped, False, "optimizer_step_was_skipped")
    rates = trainer.scheduler.get_last_lr()
    ctx.alike(accelerator, rates, "learning rates")
    # It counts the steps that one process would have taken; an engine steps schedulers itself.
    moves = 2 if "optimizer" in accelerator.backend.owns else 2 * count
    ctx.close(rates, [1e-3 * 0.5**moves], "learning rate", 1e-12)
    accelerator.end_training()
    # A scheduler that takes a metric gets the mean over the ranks, here a rise in the third step.
    plateau = partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0)
    trainer = Trainer.begin(ctx, slow, schedule=plateau)
    rates = []
    last = 0.5 if trainer.accelerator.process_index % 2 else 3.0
    for batch, metric in zip(trainer.batches(3)[0], (2.0, 1.0, last), strict=True):
        trainer.step(loss_of(trainer.model, batch), metric)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    what = "steps in which ReduceLROnPlateau, with the mean metrics 2, 1 and more, has reduced the rate"
    ctx.equal([rate < 1e-3 for rate in rates], [False, False, True], what)
    ctx.alike(trainer.accelerator, rates, "learning rates")


@check("backend", hooks="autocast scale_loss unscale_gradients")
def precisions(ctx: CheckContext) -> str:
    """Under each precision that it declares, layers compute in it, and the loss decreases."""
    tried = {BFloat16: torch.bfloat16, Float16: torch.float16}
    tried = {one: dtype for one, dtype in tried.items() if not _lacking(ctx, one)}
    if not tried:
        ctx.skip("it accepts none of torch's mixed precisions")
    done, refused = [], []
    for precision, dtype in tried.items():
        name = precision.name
        try:
            accelerator = ctx.accelerator(mixed_precision=name)
        except ConfigurationError as error:  # the backend refuses it on this device
            refused.append(f"{name} refused: {error}")
            continue
        model: Any = Net(accelerator.process_index)
        seen: list[Any] = []
        model.out.register_forward_hook(lambda _, __, out, seen=seen: seen.append(out.dtype))
        trainer = Trainer.begin(ctx, net=model, accelerator=accelerator)
        losses = trainer.train(trainer.batches(2)[0] * 6)
        ctx.equal(seen[0], dtype, f"dtype in which a layer computes under {name}")
        ctx.alike(accelerator, losses, f"losses under {name}")
        if trainer.exact:
            trainer.same_everywhere(f"the model trained under {name}")
        went = f"under {name} the loss went from {losses[0]:.3g} to {losses[-1]:.3g}"
        assert sum(losses[-2:]) < sum(losses[:2]), went
        if "precision" not in accelerator.backend.owns:
            x = torch.ones(2, 6, device=accelerator.device)
            with accelerator.autocast(AutocastKwargs(enabled=False)), torch.no_grad():
                out = nn.functional.linear(x, x)
            ctx.equal(out.dtype, torch.float32, "dtype under AutocastKwargs(enabled=False)")
        accelerator.end_training()
        done.append(name)
    if refused:  # pytest lists it at the end, because it did not run
        ctx.skip("; ".join([*(f"{name} passed" for name in done), *refused]))
    return ", ".join(done)


def _lacking(ctx: CheckContext, precision: type[Precision]) -> list[str]:
    return lacking(ctx.supports, precision.name, precision.needs)


@check("backend", hooks="unscale_gradients optimizer_step")
def overflow(ctx: CheckContext) -> None:
    """If the gradients of one rank overflow, every rank skips the step and reports it."""
    if _lacking(ctx, Float16):
        ctx.skip(f"it does not accept what 'fp16' needs: {listing(_lacking(ctx, Float16))}")
    # A small scale, so that nothing overflows without being made to.
    scaling = GradScalerKwargs(init_scale=8.0)
    try:
        accelerator = ctx.accelerator(mixed_precision="fp16", kwargs_handlers=[scaling])
    except ConfigurationError as error:
        ctx.skip(f"fp16 is refused here: {error}")
    trainer = Trainer.begin(ctx, accelerator=accelerator)
    before = trainer.weights()
    factor = float("inf") if accelerator.process_index == ctx.size - 1 else 1.0
    accelerator.backward(loss_of(trainer.model, trainer.batches(1)[0][0]) * factor)
    trainer.optimizer.step()
    if trainer.exact or factor != 1.0:  # otherwise a rank without an overflow may step
        ctx.equal(accelerator.optimizer_step_was_skipped, True, "optimizer_step_was_skipped")
    trainer.optimizer.zero_grad()
    ctx.close(
        trainer.weights(), before, "weights after a skipped step", 0.0 if trainer.exact else 1.0
    )
    trainer.train(trainer.batches(2)[0])
    ctx.close(trainer.weights(), before, "weights, steps after an overflow", 1.0)


class Image(nn.Module):
    """A convolution and a linear layer, for 6 numbers; its kernels can be stored in two memory formats."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.conv = nn.Conv2d(3, 4, (2, 1))
            self.out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> Any:
        """Samples [batch, 6] in, numbers [batch, 1] out."""
        x = x.to(self.out.weight.dtype).view(-1, 3, 2, 1)
        return self.out(torch.tanh(self.conv(x)).flatten(1))


#: Form of a model -> arguments of `to`, and how closely training must match that in one process.
_FORMS: dict[str, tuple[dict[str, Any], float]] = {
    "bfloat16": ({"dtype": torch.bfloat16}, 0.03),
    "float64": ({"dtype": torch.float64}, 1e-9),
    "channels_last": ({"memory_format": torch.channels_last}, 1e-5),
}


@check("backend", hooks=f"prepare_model {STEP} model_state consolidate")
def forms_of_models(ctx: CheckContext) -> str:
    """Models in bfloat16, float64 and channels_last train as in plain PyTorch, and keep their dtype."""
    done = []
    for form, (change, tolerance) in _FORMS.items():
        net = Image().to(**change)
        if not _can_hold(ctx.accelerator().device, net.out.weight.dtype):
            ctx.end()
            continue
        try:
            trainer = Trainer.begin(ctx, net=net, accelerator=ctx.made[0])
        except (AccelerateError, NotImplementedError) as error:  # the backend refuses it
            done.append(f"{form} refused: {str(error).strip().splitlines()[0]}")
            ctx.made[0].end_training()
            ctx.end()
            continue
        _keeps_form(trainer, form, Image().to(**change), tolerance)
        done.append(form)
        del trainer
        ctx.end()
    return "; ".join(done)


def _can_hold(device: torch.device, dtype: torch.dtype) -> bool:
    try:
        torch.zeros(1, dtype=dtype, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def _keeps_form(trainer: Trainer, form: str, expected: Image, tolerance: float) -> None:
    ctx = trainer.ctx
    backend = trainer.accelerator.backend
    dtype = expected.out.weight.dtype
    # An engine, or a backend that implements full precision itself, may train in another dtype.
    own = bool({"precision", "optimizer"} & {*backend.owns})
    own = own or "no" in (backend.supports.get("precisions") or ())

    def loss(model: Any, batch: Batch) -> torch.Tensor:
        out = model(batch[0])
        wide = torch.promote_types(out.dtype, torch.float32)
        return nn.functional.mse_loss(out.to(wide), batch[1].to(wide))

    mine, whole = trainer.batches(3)
    for batch in mine:
        trainer.step(loss(trainer.model, batch))
    got = trainer.weights()
    if not own:
        ctx.equal({one.dtype for one in got.values()}, {dtype}, f"dtypes of a model in {form}")
    plain = sgd(expected.parameters())
    for batch in whole:
        torch.autograd.backward(loss(expected, batch))
        plain.step()
        plain.zero_grad()
    near = max(tolerance, 1e-5) if own else tolerance
    what = f"weights of a model in {form}"
    ctx.close(got, dict(expected.state_dict()), what, near if trainer.exact else 1e3)


@check("backend", needs="join", hooks="join_uneven_inputs")
def join(ctx: CheckContext) -> str:
    """Ranks may run out of batches in different steps."""
    # Without momentum, because a rank without batches does not step, and would lack that state.
    trainer = Trainer.begin(ctx, no_momentum)
    accelerator = trainer.accelerator
    mine, _ = trainer.batches(2 + accelerator.process_index)
    with accelerator.join_uneven_inputs([trainer.model]):
        for batch in mine:
            trainer.step(loss_of(trainer.model, batch))
    accelerator.wait_for_everyone()
    trainer.same_everywhere("the model after uneven inputs")
    trainer.train(trainer.batches(1)[0])
    trainer.same_everywhere("the model a common step later")
    return f"{len(mine)} batches on rank {ctx.rank}"
