"""The training step of a backend, held against plain PyTorch on the batches of all ranks."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_core.backend.precision import BFloat16, Float16, Precision
from accelerate_core.config.handlers import AutocastKwargs, GradScalerKwargs
from accelerate_core.contract.capabilities import lacking
from accelerate_core.errors import ConfigurationError, listing
from accelerate_testing.checks import Skip, check
from accelerate_testing.counting import count_communication
from accelerate_testing.lab import (
    BATCH,
    MOMENTUM,
    RATE,
    Lab,
    Net,
    loss_of,
    plain_training,
)


@check("backend", needs="exact")
def training(lab: Lab) -> str | None:
    """Losses and weights of six steps are those of one process on the whole batches."""
    accelerator = lab.accelerator()
    model, optimizer = lab.ready(accelerator)
    mine, whole = lab.batches(accelerator, 6)
    losses = lab.train(accelerator, model, optimizer, mine)
    expected, weights, _ = plain_training(whole)
    lab.alike(accelerator, losses, "losses")
    lab.close(losses, expected, "losses")
    lab.close(lab.weights(accelerator, model), weights, "weights")
    lab.same_everywhere(accelerator, model, "the trained model")
    return f"6 steps, last loss {losses[-1]:.4f}"


@check("backend")
def learning(lab: Lab) -> str | None:
    """Thirty steps bring the loss down, and what a rank learns reaches the others."""
    accelerator = lab.accelerator()
    model, optimizer = lab.ready(accelerator)
    mine, _ = lab.batches(accelerator, 3)
    losses = lab.train(accelerator, model, optimizer, mine * 10)
    lab.alike(accelerator, losses, "losses")
    first, last = sum(losses[:3]), sum(losses[-3:])
    if not last < 0.8 * first:  # how fast is the algorithm's own affair
        raise AssertionError(f"the loss went from {first / 3:.3g} to {last / 3:.3g}")
    _, shares = accelerator.hooks.data_shard(accelerator)
    accelerator.end_training()
    line = f"loss {first / 3:.3g} to {last / 3:.3g}"
    if shares == 1:  # all ranks work on the same samples
        return line
    return f"{line}; what another rank learns is here in step {_reaches_others(lab)}"


#: Steps in which ranks that meet now and then have to meet.
_MEET = 256


def _reaches_others(lab: Lab) -> int:
    """Train twice, with other targets on the last rank; return the step this shows in on the first."""
    seen = []
    for shift in (0.0, 5.0):
        accelerator = lab.accelerator()
        model, optimizer = lab.ready(accelerator)
        mine, _ = lab.batches(accelerator, 1)
        ((x, y),) = mine
        if accelerator.process_index == lab.size - 1:
            y = y + shift
        told = []
        for _ in range(_MEET if not accelerator.backend.supports.get("exact", True) else 4):
            accelerator.backward(loss_of(model, (x, y)))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                told.append(model(torch.ones(1, 6, device=accelerator.device)).float().cpu())
        seen.append(accelerator.communicator.gather_object(told)[0])
        accelerator.end_training()
    for step, (one, other) in enumerate(zip(*seen, strict=True), 1):
        if not torch.equal(one, other):
            return step
    raise AssertionError(
        f"after {len(seen[0])} steps rank 0 is what it was, whatever rank {lab.size - 1} learned: the "
        "ranks train apart (where they meet less often, let the settings say so for the checks)"
    )


@check("backend", needs="gradients")
def gradients_meet(lab: Lab) -> str | None:
    """Ranks have the same gradients when `reduces_gradients` says so."""
    accelerator = lab.accelerator()
    said = accelerator.backend.reduces_gradients
    when = {"backward": "after backward", "step": "after clipping"}.get(said)
    if when is None:
        lab.skip(f"it says reduces_gradients={said!r}")
    model, _ = lab.ready(accelerator)
    mine, _ = lab.batches(accelerator, 1)
    accelerator.backward(loss_of(model, mine[0]))
    if said == "step":
        accelerator.clip_grad_norm_(model.parameters(), 1e9)
    gradients = [None if p.grad is None else p.grad.tolist() for p in model.parameters()]
    lab.alike(accelerator, gradients, f"gradients {when}")
    return when


@check("backend", needs="exact")
def accumulation(lab: Lab) -> str | None:
    """Two micro-batches per step give what one big batch gives, and so does one left at the end."""
    accelerator = lab.accelerator(gradient_accumulation_steps=2)
    model, optimizer = lab.ready(accelerator)
    mine, whole = lab.batches(accelerator, 6)
    losses = lab.train(accelerator, model, optimizer, mine)
    expected, weights, _ = plain_training(whole, per_step=2)
    lab.close(losses, expected, "losses")
    lab.close(lab.weights(accelerator, model), weights, "weights")
    accelerator.end_training()
    if "accumulation" in accelerator.backend.owns:
        return "3 steps of 2 micro-batches"
    accelerator = lab.accelerator(gradient_accumulation_steps=2)
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*whole[:3], strict=True)))
    model, optimizer, loader = lab.ready(accelerator, DataLoader(data, batch_size=BATCH))
    for _ in range(2):
        lab.train(accelerator, model, optimizer, loader)
    _, weights, _ = plain_training(whole[:3] * 2, per_step=2, per_epoch=3)
    lab.close(lab.weights(accelerator, model), weights, "weights after epochs of 3 micro-batches")
    return "3 steps of 2 micro-batches, and epochs of 3"


class Branches(nn.Module):
    """Two parts of one size, of which a forward uses one, and a third that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 1) for _ in range(3))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        """Samples [batch, 6] in, numbers [batch, 1] out."""
        y: torch.Tensor = self.parts[which](x)
        return y


@check("backend", needs="exact")
def branches(lab: Lab) -> str | None:
    """Ranks that use different parts of a model train all of them, or all refuse to."""
    accelerator = lab.accelerator()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        expected = Branches()
    model: Any = copy.deepcopy(expected)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), RATE))
    index, count = accelerator.hooks.data_shard(accelerator)
    mine, whole = lab.batches(accelerator, 3)
    refused = ""
    try:
        for x, y in mine:  # some notice only in the step after
            accelerator.backward(nn.functional.mse_loss(model(x, index % 2).float(), y))
            optimizer.step()
            optimizer.zero_grad()
    except Exception as error:
        refused = f"{type(error).__name__}: {str(error).strip().partition('. ')[0]}"
    told = accelerator.communicator.gather_object(refused)
    if all(told):
        return f"refused: {refused}"
    if any(told):
        raise AssertionError(f"refused on some ranks, and on others not: {told}")
    plain = torch.optim.SGD(expected.parameters(), RATE)
    for x, y in whole:
        parts = zip(torch.split(x, BATCH), torch.split(y, BATCH), strict=True)
        for rank, (inputs, targets) in enumerate(parts):
            loss = nn.functional.mse_loss(expected(inputs, rank % 2), targets) / count
            torch.autograd.backward(loss)
        plain.step()
        plain.zero_grad()
    with torch.no_grad():
        x = torch.ones(BATCH, 6, device=accelerator.device)
        sums = [round(float(model(x, which).float().sum()), 4) for which in range(3)]
    lab.alike(accelerator, sums, "what each part computes")
    try:
        lab.close(lab.weights(accelerator, model), dict(expected.state_dict()), "weights")
    except AssertionError as error:
        return f"alike, but not of mean gradients: {error}"
    return None


@check("backend", needs="num_items")
def counted_items(lab: Lab) -> str | None:
    """`accumulate(num_items=...)` over ragged micro-batches gives the mean over all items."""
    accelerator = lab.accelerator(gradient_accumulation_steps=2)
    if not accelerator.backend.supports.get("exact", True):
        lab.skip("it does not declare 'exact'")
    model, optimizer = lab.ready(accelerator)
    mine, whole = lab.batches(accelerator, 2)
    index, count = accelerator.hooks.data_shard(accelerator)

    def lengths(rank: int) -> list[int]:
        return [BATCH - rank % 2, 1 + rank % 2]

    for batch, length in zip(mine, lengths(index), strict=True):
        with accelerator.accumulate(model, num_items=length):
            x, y = batch[0][:length], batch[1][:length]
            loss = nn.functional.mse_loss(model(x), y, reduction="sum")
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    expected = Net(0)
    plain = torch.optim.SGD(expected.parameters(), RATE, MOMENTUM)
    parts = [
        (x[r * BATCH : r * BATCH + lengths(r)[step]], y[r * BATCH : r * BATCH + lengths(r)[step]])
        for step, (x, y) in enumerate(whole)
        for r in range(count)
    ]
    joined = (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
    torch.autograd.backward(loss_of(expected, joined))
    plain.step()
    lab.close(lab.weights(accelerator, model), dict(expected.state_dict()), "weights")
    return f"{len(joined[0])} items"


@check("backend", needs="no_sync")
def no_sync(lab: Lab) -> str | None:
    """A backward under `no_sync` reduces nothing; the next one outside brings in all gradients."""
    accelerator = lab.accelerator()
    model, optimizer = lab.ready(accelerator)
    mine, whole = lab.batches(accelerator, 2)
    with accelerator.no_sync(model), count_communication() as said:
        accelerator.backward(loss_of(model, mine[0]) / 2)
    lab.equal(said.reductions, 0, f"reductions under no_sync ({dict(said.calls)})")
    accelerator.backward(loss_of(model, mine[1]) / 2)
    optimizer.step()
    optimizer.zero_grad()
    if accelerator.backend.supports.get("exact", True):
        _, weights, _ = plain_training(whole, per_step=2)
        lab.close(lab.weights(accelerator, model), weights, "weights")
        try:
            with accelerator.no_sync(model):
                raise KeyError("of the script")
        except KeyError:
            pass
        accelerator.backward(loss_of(model, mine[0]))
        optimizer.step()
        lab.same_everywhere(accelerator, model, "a model whose no_sync was left by an exception")
    return None


@check("backend", needs="exact")
def clip_norm(lab: Lab) -> str | None:
    """Clipping uses the norm of the gradients of all ranks together, and returns it as it was."""
    accelerator = lab.accelerator()
    model, optimizer = lab.ready(accelerator)
    mine, whole = lab.batches(accelerator, 3)
    norms = []
    for batch in mine:
        accelerator.backward(loss_of(model, batch))
        norm: Any = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        lab.equal((type(norm).__name__, norm.ndim), ("Tensor", 0), "what clip_grad_norm_ returns")
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    _, weights, expected = plain_training(whole, max_norm=0.5)
    lab.close(norms, expected, "norms before clipping", 1e-4)
    lab.close(lab.weights(accelerator, model), weights, "weights")
    line = f"norms {', '.join(f'{norm:.2f}' for norm in norms)}"
    for kind in (math.inf, 1.0):
        probe = Net(0)
        probe.load_state_dict(lab.weights(accelerator, model))
        torch.autograd.backward(loss_of(probe, whole[0]))
        other = float(nn.utils.clip_grad_norm_(probe.parameters(), math.inf, kind))
        accelerator.backward(loss_of(model, mine[0]))
        try:
            told = float(accelerator.clip_grad_norm_(model.parameters(), 0.5, kind))
        except ConfigurationError:  # in so many words
            line = f"{line}; the 2-norm only"
            break
        lab.close([told / other], [1.0], f"norm_type={kind}, as part of the right one", 1e-4)
        optimizer.zero_grad()
    return line


@check("backend", needs="exact")
def small_gradients(lab: Lab) -> str | None:
    """Gradients within the bounds of clipping stay as they are."""
    accelerator = lab.accelerator()
    model, optimizer = lab.ready(accelerator)
    mine, whole = lab.batches(accelerator, 3)
    for batch in mine:
        accelerator.backward(loss_of(model, batch))
        accelerator.clip_grad_norm_(model.parameters(), 1e3)
        if "optimizer" not in accelerator.backend.owns:
            accelerator.clip_grad_value_(model.parameters(), 1e3)
        optimizer.step()
        optimizer.zero_grad()
    lab.close(lab.weights(accelerator, model), plain_training(whole)[1], "weights")
    return None


@check("backend", needs="exact")
def clip_value(lab: Lab) -> str | None:
    """Clipping by value cuts each element of the ranks' common gradients."""
    accelerator = lab.accelerator()
    model, optimizer = lab.ready(accelerator)
    mine, whole = lab.batches(accelerator, 3)
    for batch in mine:
        accelerator.backward(loss_of(model, batch))
        accelerator.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    _, weights, _ = plain_training(whole, clip_value=0.1)
    lab.close(lab.weights(accelerator, model), weights, "weights")
    return None


@check("backend")
def schedule(lab: Lab) -> str | None:
    """A scheduler moves with the steps that were taken, alike on all ranks."""
    accelerator = lab.accelerator(gradient_accumulation_steps=2)
    model = lab.net(accelerator)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    _, count = accelerator.hooks.data_shard(accelerator)
    mine, _ = lab.batches(accelerator, 4)
    for batch in mine:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    lab.equal(accelerator.optimizer_step_was_skipped, False, "optimizer_step_was_skipped")
    lab.alike(accelerator, scheduler.get_last_lr(), "learning rates")
    # It counts the steps one process would have taken; an engine steps schedulers itself.
    moves = 2 if "optimizer" in accelerator.backend.owns else 2 * count
    lab.close(scheduler.get_last_lr(), [1e-3 * 0.5**moves], "learning rate", 1e-12)
    accelerator.end_training()
    _plateau(lab)
    return None


def _plateau(lab: Lab) -> None:
    """A scheduler that is told a metric gets it."""
    accelerator = lab.accelerator()
    model = lab.net(accelerator)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rates = []
    for batch, metric in zip(lab.batches(accelerator, 3)[0], (2.0, 1.0, 3.0), strict=True):
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        scheduler.step(metric)
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    fell = [rate < 1e-3 for rate in rates]
    lab.equal(
        fell, [False, False, True], "where ReduceLROnPlateau, told 2, 1, 3, makes steps smaller"
    )
    lab.alike(accelerator, rates, "learning rates")


@check("backend")
def precisions(lab: Lab) -> str | None:
    """Under each precision it declares, layers compute in it, and the loss comes down."""
    tried = [one.name for one in (BFloat16, Float16) if not _lacking(lab, one)]
    if not tried:
        lab.skip("it accepts no mixed precision of torch's")
    done, refused = [], []
    for name in tried:
        try:
            accelerator = lab.accelerator(mixed_precision=name)
        except ConfigurationError as error:  # on this device, in so many words
            refused.append(f"{name} refused: {error}")
            continue
        model = lab.net(accelerator)
        seen: list[Any] = []
        model.out.register_forward_hook(lambda _, __, out, seen=seen: seen.append(out.dtype))
        optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
        model, optimizer = accelerator.prepare(model, optimizer)
        mine, _ = lab.batches(accelerator, 2)
        losses = lab.train(accelerator, model, optimizer, mine * 6)
        expected = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
        lab.equal(seen[0], expected, f"dtype in which a layer computes under {name}")
        lab.alike(accelerator, losses, f"losses under {name}")
        if lab.supports.get("exact", True):
            lab.same_everywhere(accelerator, model, f"the model trained under {name}")
        if not sum(losses[-2:]) < sum(losses[:2]):
            raise AssertionError(
                f"under {name} the loss went from {losses[0]:.3g} to {losses[-1]:.3g}"
            )
        if "precision" not in accelerator.backend.owns:
            _without_autocast(lab, accelerator)
        accelerator.end_training()
        done.append(name)
    if refused:  # told at the end of the tests, as what did not run
        lab.skip("; ".join([*(f"{name} passed" for name in done), *refused]))
    return ", ".join(done)


def _lacking(lab: Lab, precision: type[Precision]) -> list[str]:
    return lacking(lab.supports, precision.name, precision.needs)


def _without_autocast(lab: Lab, accelerator: Any) -> None:
    """`autocast(AutocastKwargs(enabled=False))` computes in the tensors' own dtype."""
    x = torch.ones(2, 6, device=accelerator.device)
    with accelerator.autocast(AutocastKwargs(enabled=False)), torch.no_grad():
        out = nn.functional.linear(x, torch.ones(2, 6, device=accelerator.device))
    lab.equal(out.dtype, torch.float32, "dtype under AutocastKwargs(enabled=False)")


@check("backend", needs="exact")
def overflow(lab: Lab) -> str | None:
    """Where one rank's gradients overflow, every rank skips the step and says so."""
    if _lacking(lab, Float16):
        lab.skip(f"it does not accept what 'fp16' needs: {listing(_lacking(lab, Float16))}")
    # A small scale, so that nothing overflows by itself.
    scaling = GradScalerKwargs(init_scale=8.0)
    try:
        accelerator = lab.accelerator(mixed_precision="fp16", kwargs_handlers=[scaling])
    except ConfigurationError as error:
        raise Skip(f"fp16 is refused here: {error}") from None
    model, optimizer = lab.ready(accelerator)
    before = lab.weights(accelerator, model)
    mine, _ = lab.batches(accelerator, 1)
    factor = float("inf") if accelerator.process_index == lab.size - 1 else 1.0
    accelerator.backward(loss_of(model, mine[0]) * factor)
    optimizer.step()
    lab.equal(accelerator.optimizer_step_was_skipped, True, "optimizer_step_was_skipped")
    optimizer.zero_grad()
    lab.close(lab.weights(accelerator, model), before, "weights after a skipped step", 0.0)
    return None


@check("backend", needs="join")
def join(lab: Lab) -> str | None:
    """Ranks may run out of batches at different steps."""
    accelerator = lab.accelerator()
    # Without momentum: who is out of batches does not step, and has none of the others' steps.
    model: Any = lab.net(accelerator)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), RATE))
    mine, _ = lab.batches(accelerator, 2 + accelerator.process_index)
    with accelerator.join_uneven_inputs([model]):
        for batch in mine:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.wait_for_everyone()
    lab.same_everywhere(accelerator, model, "the model after uneven inputs")
    lab.train(accelerator, model, optimizer, lab.batches(accelerator, 1)[0])
    lab.same_everywhere(accelerator, model, "the model a common step later")
    return f"{len(mine)} batches on rank {lab.rank}"
