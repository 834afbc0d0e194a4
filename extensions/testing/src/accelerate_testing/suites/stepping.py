"""The training step of a backend, held against plain PyTorch on the batches of all ranks."""

from __future__ import annotations

import copy
import math
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
from accelerate_core.errors import ConfigurationError, listing
from accelerate_testing.checks import STEP, check
from accelerate_testing.context import CheckContext
from accelerate_testing.counting import count_communication
from accelerate_testing.training import (
    BATCH,
    Net,
    Trainer,
    loss_of,
    no_momentum,
    plain_training,
    sgd,
)

#: Steps in which ranks that meet now and then have to meet.
_MEET = 256


@check("backend", needs="exact", hooks=f"prepare_model {STEP}")
def training(ctx: CheckContext) -> str:
    """Losses and weights of six steps are those of one process on the whole batches."""
    trainer = Trainer.begin(ctx)
    losses, _ = trainer.train_as_plain(6)
    ctx.alike(trainer.accelerator, losses, "losses")
    trainer.same_everywhere("the trained model")
    return f"6 steps, last loss {losses[-1]:.4f}"


@check("backend", hooks=f"prepare_model {STEP}")
def learning(ctx: CheckContext) -> str:
    """Thirty steps bring the loss down, and what a rank learns reaches the others."""
    trainer = Trainer.begin(ctx)
    accelerator = trainer.accelerator
    losses = trainer.train(trainer.batches(3)[0] * 10)
    ctx.alike(accelerator, losses, "losses")
    first, last = sum(losses[:3]), sum(losses[-3:])
    line = f"{first / 3:.3g} to {last / 3:.3g}"
    assert last < 0.8 * first, f"the loss went from {line}"  # how fast is the algorithm's affair
    _, shares = accelerator.hooks.data_shard(accelerator)
    accelerator.end_training()
    if shares == 1:  # all ranks work on the same samples
        return f"loss {line}"
    return f"loss {line}; what another rank learns is here in step {_reaches_others(ctx)}"


def _reaches_others(ctx: CheckContext) -> int:
    """Train twice, with other targets on the last rank; return the step this shows in on the first."""
    seen = []
    for shift in (0.0, 5.0):
        trainer = Trainer.begin(ctx)
        accelerator = trainer.accelerator
        ((x, y),), _ = trainer.batches(1)
        if accelerator.process_index == ctx.size - 1:
            y = y + shift
        told = []
        for _ in range(4 if trainer.exact else _MEET):
            trainer.step(loss_of(trainer.model, (x, y)))
            with torch.no_grad():
                probe = torch.ones(1, 6, device=accelerator.device)
                told.append(trainer.model(probe).float().cpu())
        seen.append(accelerator.communicator.gather_object(told)[0])
        accelerator.end_training()
    for step, (one, other) in enumerate(zip(*seen, strict=True), 1):
        if not torch.equal(one, other):
            return step
    raise AssertionError(
        f"after {len(seen[0])} steps rank 0 is what it was, whatever rank {ctx.size - 1} learned: the "
        "ranks train apart (where they meet less often, let the settings say so for the checks)"
    )


@check("backend", needs="gradients", hooks="backward clip_grad")
def gradients_meet(ctx: CheckContext) -> str:
    """Ranks have the same gradients when `reduces_gradients` says so."""
    accelerator = ctx.accelerator()
    said = accelerator.backend.reduces_gradients
    when = {"backward": "after backward", "step": "after clipping"}.get(said or "")
    if when is None:
        ctx.skip(f"it says reduces_gradients={said!r}")
    trainer = Trainer.begin(ctx, accelerator=accelerator)
    accelerator.backward(loss_of(trainer.model, trainer.batches(1)[0][0]))
    parameters = list(trainer.model.parameters())
    if said == "step":
        accelerator.clip_grad_norm_(parameters, 1e9)
    gradients = [None if p.grad is None else p.grad.tolist() for p in parameters]
    ctx.alike(accelerator, gradients, f"gradients {when}")
    return when


@check("backend", needs="exact", hooks=STEP)
def accumulation(ctx: CheckContext) -> str:
    """Two micro-batches per step give what one big batch gives, and so does one left at the end."""
    trainer = Trainer.begin(ctx, gradient_accumulation_steps=2)
    trainer.train_as_plain(6, per_step=2)
    trainer.accelerator.end_training()
    if "accumulation" in trainer.accelerator.backend.owns:
        return "3 steps of 2 micro-batches"
    trainer = Trainer.begin(ctx, gradient_accumulation_steps=2)
    _, whole = trainer.batches(3)
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*whole, strict=True)))
    loader = trainer.accelerator.prepare(DataLoader(data, batch_size=BATCH))
    for _ in range(2):
        trainer.train(loader)
    _, weights, _ = plain_training(whole * 2, per_step=2, per_epoch=3)
    ctx.close(trainer.weights(), weights, "weights after epochs of 3 micro-batches")
    return "3 steps of 2 micro-batches, and epochs of 3"


class Branches(nn.Module):
    """Two parts of one size, of which a forward uses one, and a third that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 1) for _ in range(3))

    def forward(self, x: torch.Tensor, which: int) -> Any:
        """Samples [batch, 6] in, numbers [batch, 1] out."""
        return self.parts[which](x)


@check("backend", needs="exact", hooks="backward")
def branches(ctx: CheckContext) -> str | None:
    """Ranks that use different parts of a model train all of them, or all refuse to."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        expected = Branches()
    trainer = Trainer.begin(ctx, no_momentum, net=copy.deepcopy(expected))
    accelerator = trainer.accelerator
    index, count = accelerator.hooks.data_shard(accelerator)
    mine, whole = trainer.batches(3)
    refused = ""
    try:
        for x, y in mine:  # some notice only in the step after
            trainer.step(nn.functional.mse_loss(trainer.model(x, index % 2).float(), y))
    except Exception as error:
        refused = f"{type(error).__name__}: {str(error).strip().partition('. ')[0]}"
    told = accelerator.communicator.gather_object(refused)
    if all(told):
        return f"refused: {refused}"
    assert not any(told), f"refused on some ranks, and on others not: {told}"
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
    ctx.alike(accelerator, sums, "what each part computes")
    try:
        ctx.close(trainer.weights(), dict(expected.state_dict()), "weights")
    except AssertionError as error:
        return f"alike, but not of mean gradients: {error}"
    return None


@check("backend", needs="num_items", hooks="scale_gradients loss_shard")
def counted_items(ctx: CheckContext) -> str:
    """`accumulate(num_items=...)` over ragged micro-batches gives the mean over all items."""
    if not ctx.supports.get("exact", True):
        ctx.skip("it does not declare 'exact'")
    trainer = Trainer.begin(ctx, gradient_accumulation_steps=2)
    accelerator = trainer.accelerator
    mine, whole = trainer.batches(2)
    index, count = accelerator.hooks.data_shard(accelerator)

    def lengths(rank: int) -> list[int]:
        return [BATCH - rank % 2, 1 + rank % 2]

    for (x, y), length in zip(mine, lengths(index), strict=True):
        with accelerator.accumulate(trainer.model, num_items=length):
            out = trainer.model(x[:length])
            trainer.step(nn.functional.mse_loss(out, y[:length], reduction="sum"))
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


@check("backend", needs="no_sync", hooks="no_sync backward")
def no_sync(ctx: CheckContext) -> None:
    """A backward under `no_sync` reduces nothing; the next one outside brings in all gradients."""
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
    trainer.same_everywhere("a model whose no_sync was left by an exception")


@check("backend", needs="exact", hooks="clip_grad")
def clip_norm(ctx: CheckContext) -> str:
    """Clipping uses the norm of the gradients of all ranks together, and returns it as it was."""
    trainer = Trainer.begin(ctx)
    accelerator, model = trainer.accelerator, trainer.model
    norms: list[float] = []

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
        except ConfigurationError:  # in so many words
            return f"{line}; the 2-norm only"
        ctx.close([told / other], [1.0], f"norm_type={kind}, as part of the right one", 1e-4)
        trainer.optimizer.zero_grad()
    return line


@check("backend", needs="exact", hooks="clip_grad")
def small_gradients(ctx: CheckContext) -> None:
    """Gradients within the bounds of clipping stay as they are."""
    trainer = Trainer.begin(ctx)
    accelerator, model = trainer.accelerator, trainer.model

    def clip() -> None:
        accelerator.clip_grad_norm_(model.parameters(), 1e3)
        if "optimizer" not in accelerator.backend.owns:
            accelerator.clip_grad_value_(model.parameters(), 1e3)

    trainer.train_as_plain(3, clip)


@check("backend", needs="exact", hooks="clip_grad")
def clip_value(ctx: CheckContext) -> None:
    """Clipping by value cuts each element of the ranks' common gradients."""
    trainer = Trainer.begin(ctx)
    clip = trainer.accelerator.clip_grad_value_
    trainer.train_as_plain(3, lambda: clip(trainer.model.parameters(), 0.1), clip_value=0.1)


@check("backend", hooks="optimizer_step prepare_scheduler")
def schedule(ctx: CheckContext) -> None:
    """A scheduler moves with the steps that were taken, alike on all ranks."""
    slow = partial(torch.optim.SGD, lr=1e-3)
    halving = partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)
    trainer = Trainer.begin(ctx, slow, schedule=halving, gradient_accumulation_steps=2)
    accelerator = trainer.accelerator
    _, count = accelerator.hooks.data_shard(accelerator)
    trainer.train(trainer.batches(4)[0])
    ctx.equal(accelerator.optimizer_step_was_skipped, False, "optimizer_step_was_skipped")
    rates = trainer.scheduler.get_last_lr()
    ctx.alike(accelerator, rates, "learning rates")
    # It counts the steps one process would have taken; an engine steps schedulers itself.
    moves = 2 if "optimizer" in accelerator.backend.owns else 2 * count
    ctx.close(rates, [1e-3 * 0.5**moves], "learning rate", 1e-12)
    accelerator.end_training()
    # One that is told a metric gets it.
    plateau = partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0)
    trainer = Trainer.begin(ctx, slow, schedule=plateau)
    rates = []
    for batch, metric in zip(trainer.batches(3)[0], (2.0, 1.0, 3.0), strict=True):
        trainer.step(loss_of(trainer.model, batch), metric)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    what = "where ReduceLROnPlateau, told 2, 1, 3, makes steps smaller"
    ctx.equal([rate < 1e-3 for rate in rates], [False, False, True], what)
    ctx.alike(trainer.accelerator, rates, "learning rates")


@check("backend", hooks="autocast scale_loss unscale_gradients")
def precisions(ctx: CheckContext) -> str:
    """Under each precision it declares, layers compute in it, and the loss comes down."""
    tried = {BFloat16: torch.bfloat16, Float16: torch.float16}
    tried = {one: dtype for one, dtype in tried.items() if not _lacking(ctx, one)}
    if not tried:
        ctx.skip("it accepts no mixed precision of torch's")
    done, refused = [], []
    for precision, dtype in tried.items():
        name = precision.name
        try:
            accelerator = ctx.accelerator(mixed_precision=name)
        except ConfigurationError as error:  # on this device, in so many words
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
    if refused:  # told at the end of the tests, as what did not run
        ctx.skip("; ".join([*(f"{name} passed" for name in done), *refused]))
    return ", ".join(done)


def _lacking(ctx: CheckContext, precision: type[Precision]) -> list[str]:
    return lacking(ctx.supports, precision.name, precision.needs)


@check("backend", needs="exact", hooks="unscale_gradients optimizer_step")
def overflow(ctx: CheckContext) -> None:
    """Where one rank's gradients overflow, every rank skips the step and says so."""
    if _lacking(ctx, Float16):
        ctx.skip(f"it does not accept what 'fp16' needs: {listing(_lacking(ctx, Float16))}")
    # A small scale, so that nothing overflows by itself.
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
    ctx.equal(accelerator.optimizer_step_was_skipped, True, "optimizer_step_was_skipped")
    trainer.optimizer.zero_grad()
    ctx.close(trainer.weights(), before, "weights after a skipped step", 0.0)


@check("backend", needs="join", hooks="join_uneven_inputs")
def join(ctx: CheckContext) -> str:
    """Ranks may run out of batches at different steps."""
    # Without momentum: who is out of batches does not step, and has none of the others' steps.
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
