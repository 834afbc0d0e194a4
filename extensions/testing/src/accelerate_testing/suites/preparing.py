"""What `prepare` of a backend returns, object by object."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_core import Accelerator
from accelerate_testing.checks import check
from accelerate_testing.lab import (
    BATCH,
    MOMENTUM,
    RATE,
    Lab,
    Net,
    draw,
    loss_of,
    plain_training,
    seed,
)


@check("backend")
def prepare(lab: Lab) -> str | None:
    """Models, optimizers, schedulers and loaders come back in order and belong together."""
    accelerator = lab.accelerator()
    model = lab.net(accelerator)
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    data = DataLoader(TensorDataset(torch.randn(4 * BATCH, 6)), batch_size=BATCH)
    other = {"any": "object"}
    made = accelerator.prepare(data, scheduler, model, other, optimizer)
    lab.equal(len(made), 5, "objects that come back")
    loader, scheduler, model, same, optimizer = made
    lab.equal(same is other, True, "another object comes back as it is")
    lab.equal(isinstance(model, nn.Module), True, "the model is a module")
    for what, thing, words in (
        ("optimizer", optimizer, ("step", "zero_grad", "param_groups")),
        ("scheduler", scheduler, ("step", "get_last_lr")),
        ("loader", loader, ("__iter__", "__len__")),
    ):
        for word in words:
            if not hasattr(thing, word):
                raise AssertionError(f"the prepared {what} has no {word!r}")
    if "optimizer" not in accelerator.backend.owns:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        wanted = {id(p) for p in accelerator.unwrap_model(model).parameters()}
        lab.equal(held == wanted, True, "the optimizer holds the parameters of the prepared model")
    out = model(next(iter(loader))[0])
    lab.equal(tuple(out.shape), (BATCH, 1), "shape of the model's output")
    again = accelerator.prepare(model, optimizer)
    lab.equal([a is b for a, b in zip(again, (model, optimizer), strict=True)], [True, True],
              "what is prepared is returned as it is")  # fmt: skip
    if accelerator.device.type != "meta":
        places = {p.device.type for p in accelerator.unwrap_model(model).parameters()}
        lab.equal(places <= {accelerator.device.type, "cpu"}, True, f"parameters are on {places}")
    return None


@check("precision", "extension", place="alone")
@check("backend")
def randomness(lab: Lab) -> str | None:
    """What is drawn at random depends on the seed of the script, after `prepare` and after steps."""
    drawn = []
    for number in (1, 2):
        accelerator = lab.accelerator()
        mine, _ = lab.batches(accelerator, 2)
        seed(number)
        model, optimizer = lab.ready(accelerator)
        told = draw("prepare")
        for batch in mine:
            seed(number)
            lab.train(accelerator, model, optimizer, [batch])
            told |= draw("a step")
        accelerator.end_training()
        drawn.append(told)
    for what, one in drawn[0].items():
        if one == drawn[1][what]:
            raise AssertionError(f"{what} draws {one:.6f}, whatever seed was set before")
    return ", ".join(drawn[0])


@check("backend")
def same_start(lab: Lab) -> str | None:
    """Ranks whose weights and buffers differ start from those of the main process."""
    accelerator = lab.accelerator()
    model, _ = lab.ready(accelerator)
    x = torch.ones(2, 6, device=accelerator.device)
    model.eval()
    with torch.no_grad():
        seen = model(x).float().cpu()
    expected = Net(0)(x.cpu()).detach()
    lab.close(seen, expected, "output of the prepared model")
    return None


class _Wide(nn.Module):
    """A model with arguments of all kinds, and dropout: in evaluation it is `w * (a - b) * scale`.

    Who drops an argument is told by the output.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(6))
        self.drop = nn.Dropout(0.5)

    def forward(
        self, a: torch.Tensor, b: Any = 0.0, *more: Any, scale: float = 1.0, **named: Any
    ) -> dict[str, Any]:
        out = self.drop(self.w * (a - b) * scale)
        return {"out": out, "told": [len(more), sorted(named)]}


@check("backend")
def calls_of_models(lab: Lab) -> str | None:
    """A prepared model takes what the user's takes, answers as it does, and stays in its mode."""
    accelerator = lab.accelerator()
    a = torch.ones(2, 6, device=accelerator.device)
    for training in (False, True):
        model = accelerator.prepare_model(_Wide().train(training), evaluation_mode=not training)
        modes = {one.training for one in accelerator.unwrap_model(model).modules()}
        lab.equal(modes, {training}, f"training, of a model prepared with training={training}")
        model.eval()
        with torch.no_grad():
            got = model(a, 3 * a, "third", scale=0.5, word="named")
        lab.equal(sorted(got), ["out", "told"], "keys of the dict that the model answers with")
        lab.close(got["out"], -a, "output for two tensors and a keyword")
        lab.equal(got["told"], [1, ["word"]], "other arguments that reach the model")
        model.train()
        inner: Any = accelerator.unwrap_model(model)
        lab.equal(inner.drop.training, True, "training, after train()")
    return None


@check("backend")
def kinds_of_models(lab: Lab) -> str | None:
    """Models for evaluation, frozen ones and ones without parameters pass through `prepare`."""
    accelerator = lab.accelerator()
    x = torch.ones(2, 6, device=accelerator.device)
    frozen = Net(0).requires_grad_(False)
    for what, model, evaluation in (
        ("for evaluation", Net(0), True),
        ("frozen", frozen, False),
        ("without parameters", nn.Tanh(), False),
    ):
        prepared = accelerator.prepare_model(model, evaluation_mode=evaluation)
        with torch.no_grad():
            out = prepared(x)
        expected = torch.tanh(x) if isinstance(model, nn.Tanh) else Net(0)(x.cpu()).detach()
        lab.close(out, expected, f"output of a model {what}")
    return None


def _pair(lab: Lab, weights: int) -> tuple[Accelerator, list[Any], list[Any]]:
    """Return two prepared models, and an Adam for each."""
    accelerator = lab.accelerator()
    models = [lab.net(accelerator, weights), lab.net(accelerator, weights)]
    optimizers = [torch.optim.Adam(model.parameters(), 0.01) for model in models]
    made = accelerator.prepare(*models, *optimizers)
    return accelerator, list(made[:2]), list(made[2:])


@check("backend", needs="several_models")
def several_models(lab: Lab) -> str | None:
    """Two models with an optimizer each train side by side, and both are saved and loaded."""
    accelerator, models, optimizers = _pair(lab, 0)
    mine, whole = lab.batches(accelerator, 4)
    expected = [Net(0), Net(0)]
    plain = [torch.optim.Adam(model.parameters(), 0.01) for model in expected]
    for index, (batch, all_of_it) in enumerate(zip(mine, whole, strict=True)):
        which = index % 2
        accelerator.backward(loss_of(models[which], batch))
        optimizers[which].step()
        optimizers[which].zero_grad()
        torch.autograd.backward(loss_of(expected[which], all_of_it))
        plain[which].step()
        plain[which].zero_grad()
    if accelerator.backend.supports.get("exact", True):
        for name, model, its in zip(("first", "second"), models, expected, strict=True):
            lab.close(lab.weights(accelerator, model), dict(its.state_dict()), f"{name} model")
    if "optimizer" not in accelerator.backend.owns:
        _on_all(accelerator, models, mine[0])
    path = accelerator.save_state(str(lab.scratch("several_models")))
    after = _trained(lab, accelerator, models, optimizers, mine)
    del models, optimizers
    lab.end()
    accelerator, models, optimizers = _pair(lab, 5)
    accelerator.load_state(path)
    again = _trained(lab, accelerator, models, optimizers, mine)
    for name, one, other in zip(("first", "second"), again, after, strict=True):
        lab.close(one, other, f"{name} model, steps after load_state", 1e-6)
    return None


@check("backend", needs="no_sync")
def one_of_two(lab: Lab) -> str | None:
    """`no_sync` of one model leaves the other alone, and `trigger_sync_in_backward` ends it."""
    if not lab.supports.get("several_models", True):
        lab.skip("it does not declare 'several_models'")
    accelerator, models, optimizers = _pair(lab, 0)
    mine, _ = lab.batches(accelerator, 2)
    with accelerator.no_sync(models[0]):
        accelerator.backward(loss_of(models[1], mine[0]))
        accelerator.backward(loss_of(models[0], mine[0]))
    if lab.supports.get("exact", True):
        optimizers[1].step()
        lab.same_everywhere(accelerator, models[1], "the model beside one under no_sync")
    with accelerator.no_sync(models[0]):
        loss = loss_of(models[0], mine[1])
    with accelerator.trigger_sync_in_backward(models[0]):
        accelerator.backward(loss)
    optimizers[0].step()
    if lab.supports.get("exact", True):
        lab.same_everywhere(accelerator, models[0], "the model after trigger_sync_in_backward")
    return None


@check("backend")
def contexts(lab: Lab) -> str | None:
    """Models can be made inside of `init_model_context`, and groups of ranks are those asked for."""
    accelerator = lab.accelerator()
    with accelerator.hooks.init_model_context(accelerator):
        model: Any = lab.net(accelerator)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), RATE))
    lab.train(accelerator, model, optimizer, lab.batches(accelerator, 1)[0])
    if lab.rank == lab.size - 1:  # only members ask for a group
        alone = accelerator.hooks.new_group(accelerator, [lab.rank], None)
        if alone is not None:
            lab.equal(torch.distributed.get_world_size(alone), 1, "ranks of a group of one")
    accelerator.wait_for_everyone()
    return None


def _on_all(accelerator: Accelerator, models: Any, batch: Any) -> None:
    """Scaling and clipping reach the gradients of all models, and of all their parameters."""

    def largest() -> list[float]:
        grads = [p.grad for model in models for p in model.parameters() if p.grad is not None]
        local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
        return [float(grad.abs().max()) if grad.numel() else 0.0 for grad in local]

    for model in models:
        accelerator.backward(loss_of(model, batch))
    before = largest()
    accelerator.hooks.scale_gradients(accelerator, models, torch.tensor(0.5))
    ratios = [one / other for one, other in zip(largest(), before, strict=True) if other > 1e-6]
    if max(ratios) > 0.51 or max(ratios) - min(ratios) > 1e-3:  # less, where it divides by ranks
        raise AssertionError(
            f"scale_gradients by 0.5 scales the gradients of two models by {ratios}"
        )
    parameters = [p for model in models for p in model.parameters()]
    accelerator.clip_grad_value_(parameters, 1e-4)
    if max(largest()) > 1.01e-4:
        raise AssertionError(f"clip_grad_value_ by 1e-4 of two models leaves {max(largest())}")
    for model in models:
        for p in model.parameters():
            p.grad = None


def _trained(
    lab: Lab, accelerator: Accelerator, models: Any, optimizers: Any, batches: Any
) -> list[dict[str, torch.Tensor]]:
    """Train each model on all batches; return the weights of all."""
    for model, optimizer in zip(models, optimizers, strict=True):
        lab.train(accelerator, model, optimizer, batches)
    return [lab.weights(accelerator, model) for model in models]


@check("backend")
def unwrap(lab: Lab) -> str | None:
    """`unwrap_model` gives the user's own model: its class, attributes and names."""
    accelerator = lab.accelerator()
    model, optimizer = lab.ready(accelerator)
    mine, _ = lab.batches(accelerator, 1)
    lab.train(accelerator, model, optimizer, mine)
    inner = accelerator.unwrap_model(model)
    lab.equal(isinstance(inner, Net), True, f"{type(inner).__name__} is the user's class")
    lab.equal(
        [name for name, _ in inner.named_parameters()],
        [name for name, _ in Net(0).named_parameters()],
        "names of the parameters",
    )
    lab.equal(accelerator.unwrap_model(inner) is inner, True, "unwrapping twice is unwrapping once")
    return None


@check("backend", needs="exact")
def state_dict(lab: Lab) -> str | None:
    """`get_state_dict` gives whole tensors under the user's own names."""
    accelerator = lab.accelerator()
    model, optimizer = lab.ready(accelerator)
    mine, whole = lab.batches(accelerator, 2)
    lab.train(accelerator, model, optimizer, mine)

    _, expected, _ = plain_training(whole)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        lab.close(state, expected, "state dict")
        for name, value in expected.items():
            lab.equal(state[name].dtype, value.dtype, f"dtype of {name}")
    return f"{len(expected)} tensors"


@check("backend", needs="compile")
def compiled(lab: Lab) -> str | None:
    """A compiled model trains as the plain one does."""
    accelerator = lab.accelerator(dynamo_backend="eager")
    model, optimizer = lab.ready(accelerator)
    mine, whole = lab.batches(accelerator, 2)
    losses = lab.train(accelerator, model, optimizer, mine)
    if accelerator.backend.supports.get("exact", True):
        lab.close(losses, plain_training(whole)[0], "losses")
    return None
