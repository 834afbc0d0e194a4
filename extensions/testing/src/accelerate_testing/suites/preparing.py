"""What a backend makes of each object in `prepare`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_testing.checks import SAVE, STATE, STEP, check
from accelerate_testing.context import CheckContext
from accelerate_testing.training import (
    BATCH,
    Net,
    Trainer,
    adam,
    draw,
    local_gradients,
    loss_of,
    no_momentum,
    plain_training,
    seed,
    sgd,
)


@check("backend", alone=True, hooks=f"prepare_model {STEP} {STATE} convert on_start on_step_end")
def one_process(ctx: CheckContext) -> str:
    """One process trains as plain PyTorch does, and can save and load."""
    trainer = Trainer.begin(ctx)
    accelerator = trainer.accelerator
    ctx.equal(accelerator.num_processes, 1, "number of processes")
    ctx.equal(accelerator.backend.name, ctx.name, "the active backend")
    mine, _ = trainer.batches(4)
    if trainer.exact:
        trainer.train_as_plain(len(mine))
    else:
        trainer.train(mine)
    trained = trainer.weights()
    path = accelerator.save_state(str(ctx.scratch("one_process")))
    trainer.train(mine)
    accelerator.load_state(path)
    ctx.close(trainer.weights(), trained, "weights after load_state", 1e-7)
    return f"{len(mine)} steps"


@check("backend", hooks="prepare prepare_model prepare_optimizer prepare_scheduler")
def prepare(ctx: CheckContext) -> None:
    """Models, optimizers, schedulers and loaders are returned in order and belong together."""
    accelerator = ctx.accelerator()
    model = Net(accelerator.process_index)
    optimizer: Any = sgd(model.parameters())
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    data = DataLoader(TensorDataset(torch.randn(4 * BATCH, 6)), batch_size=BATCH)
    other = {"any": "object"}
    made = accelerator.prepare(data, scheduler, model, other, optimizer)
    ctx.equal(len(made), 5, "number of returned objects")
    loader, scheduler, model, same, optimizer = made
    ctx.equal(same is other, True, "another object is returned unchanged")
    ctx.equal(isinstance(model, nn.Module), True, "the model is a module")
    for what, thing, words in (
        ("optimizer", optimizer, ("step", "zero_grad", "param_groups")),
        ("scheduler", scheduler, ("step", "get_last_lr")),
        ("loader", loader, ("__iter__", "__len__")),
    ):
        for word in words:
            assert hasattr(thing, word), f"the prepared {what} has no {word!r}"
    if "optimizer" not in accelerator.backend.owns:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        wanted = {id(p) for p in accelerator.unwrap_model(model).parameters()}
        ctx.equal(held == wanted, True, "the optimizer holds the parameters of the prepared model")
    out = model(next(iter(loader))[0])
    ctx.equal(tuple(out.shape), (BATCH, 1), "shape of the model's output")
    again = accelerator.prepare(model, optimizer)
    ctx.equal([a is b for a, b in zip(again, (model, optimizer), strict=True)], [True, True],
              "prepared objects are returned unchanged")  # fmt: skip
    if accelerator.device.type != "meta":
        places = {p.device.type for p in accelerator.unwrap_model(model).parameters()}
        ctx.equal(places <= {accelerator.device.type, "cpu"}, True, f"parameters are on {places}")


_MAKES = "prepare prepare_model prepare_optimizer prepare_scheduler convert"
#: What happens before a number is drawn -> the hooks that are called there.
_DRAWN_AFTER = {
    "the start": "on_start device mesh init_process_group",
    "prepare": _MAKES,
    "a step": f"{STEP} on_step_end",
}


@check("precision", "extension", alone=True, hooks=f"on_start {_MAKES}")
@check("backend", hooks=f"on_start {_MAKES}")
def randomness(ctx: CheckContext) -> str:
    """Random numbers depend on the script's seed, and on how many were drawn since."""
    runs = []
    for number, drawn in (
        (1, 0),
        (2, 0),
        (1, 1),
    ):  # the last one shows whether the seed is set again
        seed(number, drawn)
        accelerator = ctx.accelerator()
        told = draw("the start")
        seed(number, drawn)
        halving = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
        trainer = Trainer.begin(ctx, accelerator=accelerator, schedule=halving)
        told |= draw("prepare")
        for batch in trainer.batches(2)[0]:
            seed(number, drawn)
            trainer.train([batch])
            told |= draw("a step")
        accelerator.end_training()
        runs.append(told)
    first, *others = runs
    for other, whatever in zip(
        others, ("seed was set", "was drawn since the seed was set"), strict=True
    ):
        for what, one in first.items():
            ctx.hooks = _DRAWN_AFTER[what.partition(" after ")[2]]
            assert one != other[what], f"{what} draws {one:.6f}, whatever {whatever} before"
    return ", ".join(first)


@check("backend", hooks="prepare_model")
def same_start(ctx: CheckContext) -> None:
    """Ranks with different weights and buffers start from those of the main process."""
    trainer = Trainer.begin(ctx)
    x = torch.ones(2, 6, device=trainer.accelerator.device)
    trainer.model.eval()
    with torch.no_grad():
        seen = trainer.model(x).float().cpu()
    ctx.close(seen, Net(0)(x.cpu()).detach(), "output of the prepared model")


class _Wide(nn.Module):
    """A model with arguments of all kinds and dropout; in evaluation it is `w * (a - b) * scale`.

    Its output shows which arguments arrive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(6))
        self.drop = nn.Dropout(0.5)

    def forward(
        self, a: torch.Tensor, b: Any = 0.0, *more: Any, scale: float = 1.0, **named: Any
    ) -> dict[str, Any]:
        out = self.drop(self.w * (a - b) * scale)
        return {"out": out, "report": [len(more), sorted(named)]}


@check("backend", hooks="prepare prepare_model")
def calls_of_models(ctx: CheckContext) -> None:
    """A prepared model takes the same arguments as the user's, returns the same, and keeps its mode."""
    accelerator = ctx.accelerator()
    a = torch.ones(2, 6, device=accelerator.device)
    for training in (False, True):
        model = accelerator.prepare_model(_Wide().train(training), evaluation_mode=not training)
        modes = {one.training for one in accelerator.unwrap_model(model).modules()}
        ctx.equal(modes, {training}, f"training of a model that had training={training}")
        model.eval()
        with torch.no_grad():
            got = model(a, 3 * a, "third", scale=0.5, word="named")
        ctx.equal(sorted(got), ["out", "report"], "keys of the dict that the model returns")
        ctx.close(got["out"], -a, "output for two tensors and a keyword")
        ctx.equal(got["report"], [1, ["word"]], "other arguments that reach the model")
        model.train()
        inner: Any = accelerator.unwrap_model(model)
        ctx.equal(inner.drop.training, True, "training after train()")


class _Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(6, 6, bias=False)
            self.second = nn.Linear(6, 6, bias=False)
            self.out = nn.Linear(6, 1)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> Any:
        """Samples [batch, 6] in, numbers [batch, 1] out."""
        return self.out(self.second(torch.tanh(self.first(x))))


@check("backend", hooks=f"prepare prepare_model {STEP}")
def ties(ctx: CheckContext) -> None:
    """A weight that two layers share stays one weight, and trains as in one process."""
    accelerator = ctx.accelerator()
    net = _Tied(accelerator.process_index)
    trainer = Trainer.begin(ctx, no_momentum, net=net, accelerator=accelerator)
    inner: Any = accelerator.unwrap_model(trainer.model)
    ctx.equal(inner.second.weight is inner.first.weight, True, "both layers have the same weight")
    mine, whole = trainer.batches(3)
    trainer.train(mine)
    ctx.equal(inner.second.weight is inner.first.weight, True, "the same weight after training")
    got = trainer.weights()
    ctx.close(got["second.weight"], got["first.weight"], "the weight of the second layer", 0.0)
    if trainer.exact:
        expected = plain_training(whole, net=_Tied(0), optimizer=no_momentum)[1]
        ctx.close(got, {name: expected[name] for name in got}, "weights")


@check("backend", hooks="prepare_model")
def kinds_of_models(ctx: CheckContext) -> None:
    """`prepare` accepts models for evaluation, frozen models and models without parameters."""
    accelerator = ctx.accelerator()
    x = torch.ones(2, 6, device=accelerator.device)
    for what, model, evaluation in (
        ("for evaluation", Net(0), True),
        ("frozen", Net(0).requires_grad_(False), False),
        ("without parameters", nn.Tanh(), False),
    ):
        prepared = accelerator.prepare_model(model, evaluation_mode=evaluation)
        with torch.no_grad():
            out = prepared(x)
        expected = torch.tanh(x) if isinstance(model, nn.Tanh) else Net(0)(x.cpu()).detach()
        ctx.close(out, expected, f"output of a model {what}")


def pair(ctx: CheckContext, weights: int) -> list[Trainer]:
    """Return two models that were prepared together, each with an Adam optimizer."""
    accelerator = ctx.accelerator()
    models: list[Any] = [Net(weights + accelerator.process_index) for _ in range(2)]
    made = accelerator.prepare(*models, *(adam(model.parameters()) for model in models))
    return [Trainer(ctx, accelerator, made[which], made[2 + which]) for which in range(2)]


@check("backend", needs="several_models", hooks=f"prepare_model {STEP} {STATE}")
def several_models(ctx: CheckContext) -> None:
    """Two models, each with an optimizer, train side by side, and both are saved and loaded."""
    both = pair(ctx, 0)
    accelerator = both[0].accelerator
    mine, whole = both[0].batches(4)
    expected = [Net(0), Net(0)]
    plain = [adam(model.parameters()) for model in expected]
    for index, (batch, all_of_it) in enumerate(zip(mine, whole, strict=True)):
        which = index % 2
        both[which].step(loss_of(both[which].model, batch))
        torch.autograd.backward(loss_of(expected[which], all_of_it))
        plain[which].step()
        plain[which].zero_grad()
    if both[0].exact:
        for name, one, its in zip(("first", "second"), both, expected, strict=True):
            ctx.close(one.weights(), dict(its.state_dict()), f"{name} model")
    if "optimizer" not in accelerator.backend.owns:
        _on_all(both, mine[0])
    del accelerator
    goes_on(ctx, both, mine, "several_models")


def goes_on(ctx: CheckContext, both: list[Trainer], batches: Any, name: str) -> None:
    """Save two models and one without an optimizer, load them with another Accelerator, and continue."""
    accelerator = both[0].accelerator
    ctx.hooks = SAVE
    average = _average_of(ctx, accelerator, 7)
    path = accelerator.save_state(str(ctx.scratch(name)))
    kept = average.weights()
    after = _trained(both, batches)
    both.clear()
    del accelerator, average
    ctx.end()
    both += pair(ctx, 5)
    accelerator = both[0].accelerator
    another = _average_of(ctx, accelerator, 9)
    accelerator.load_state(path)
    ctx.close(another.weights(), kept, "a model without an optimizer, after load_state", 1e-7)
    ctx.close(_trained(both, batches), after, "models some steps after load_state", 1e-6)


def _average_of(ctx: CheckContext, accelerator: Any, weights: int) -> Trainer:
    """Prepare a model that a script keeps but does not train, such as an average of weights."""
    model = accelerator.prepare_model(Net(weights).requires_grad_(False))
    return Trainer(ctx, accelerator, model, None)


def _trained(both: list[Trainer], batches: Any) -> list[dict[str, torch.Tensor]]:
    """Train each model on all batches; return the weights of each."""
    for trainer in both:
        trainer.train(batches)
    return [trainer.weights() for trainer in both]


def _on_all(both: list[Trainer], batch: Any) -> None:
    """Scaling and clipping reach the gradients of all models, and of all their parameters."""
    accelerator = both[0].accelerator
    models = [trainer.model for trainer in both]
    ctx = both[0].ctx
    parameters = [p for model in models for p in model.parameters()]

    def largest() -> list[float]:
        local = local_gradients(parameters)
        return [float(grad.abs().max()) if grad.numel() else 0.0 for grad in local]

    for model in models:
        accelerator.backward(loss_of(model, batch))
    before = largest()
    ctx.hooks = "scale_gradients"
    accelerator.hooks.scale_gradients(models, torch.tensor(0.5))
    ratios = [one / other for one, other in zip(largest(), before, strict=True) if other > 1e-6]
    # The ratios are smaller if the backend divides by the number of ranks.
    halved = max(ratios) <= 0.51 and max(ratios) - min(ratios) <= 1e-3
    assert halved, f"scale_gradients by 0.5 scales the gradients of two models by {ratios}"
    ctx.hooks = "clip_grad"
    accelerator.clip_grad_value_(parameters, 1e-4)
    left = max(largest())
    assert left <= 1.01e-4, f"clip_grad_value_ by 1e-4 of two models leaves {left}"
    for p in parameters:
        p.grad = None


@check("backend", needs="no_sync", hooks="no_sync trigger_sync_in_backward backward")
def one_of_two(ctx: CheckContext) -> None:
    """`no_sync` of one model does not affect the other, and `trigger_sync_in_backward` ends it."""
    if not ctx.supports.get("several_models", True):
        ctx.skip("it does not declare 'several_models'")
    first, second = pair(ctx, 0)
    accelerator = first.accelerator
    mine, _ = first.batches(2)
    with accelerator.no_sync(first.model):
        accelerator.backward(loss_of(second.model, mine[0]))
        accelerator.backward(loss_of(first.model, mine[0]))
    if first.exact:
        second.optimizer.step()
        second.same_everywhere("the model next to one under no_sync")
    with accelerator.no_sync(first.model):
        loss = loss_of(first.model, mine[1])
    with accelerator.trigger_sync_in_backward(first.model):
        accelerator.backward(loss)
    first.optimizer.step()
    if first.exact:
        first.same_everywhere("the model after trigger_sync_in_backward")


@check("backend", hooks="init_model_context new_group")
def contexts(ctx: CheckContext) -> None:
    """Models can be created in `init_model_context`, and `new_group` returns the group it was asked for."""
    accelerator = ctx.accelerator()
    with accelerator.hooks.init_model_context():
        net = Net(accelerator.process_index)
    trainer = Trainer.begin(ctx, no_momentum, net=net, accelerator=accelerator)
    trainer.train(trainer.batches(1)[0])
    if ctx.rank == ctx.size - 1:  # only members of a group ask for it
        alone = accelerator.hooks.new_group([ctx.rank], None)
        if alone is not None:
            ctx.equal(torch.distributed.get_world_size(alone), 1, "ranks of a group of one")
    accelerator.wait_for_everyone()


@check("backend", hooks="unwrap_model prepare_model")
def unwrap(ctx: CheckContext) -> None:
    """`unwrap_model` returns the user's own model, with its class and the names of its parameters."""
    trainer = Trainer.begin(ctx)
    trainer.train(trainer.batches(1)[0])
    inner = trainer.accelerator.unwrap_model(trainer.model)
    ctx.equal(isinstance(inner, Net), True, f"the class {type(inner).__name__} is the user's")
    names, its = ([name for name, _ in one.named_parameters()] for one in (inner, Net(0)))
    ctx.equal(names, its, "names of the parameters")
    twice = trainer.accelerator.unwrap_model(inner)
    ctx.equal(twice is inner, True, "unwrapping twice returns the same model")


@check("backend", hooks="consolidate")
def state_dict(ctx: CheckContext) -> str:
    """`get_state_dict` returns whole tensors with the user's own names."""
    trainer = Trainer.begin(ctx)
    mine, whole = trainer.batches(2)
    trainer.train(mine)
    _, expected, _ = plain_training(whole)
    state = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.accelerator.is_main_process:
        # If the backend is not exact, its weights may have any values.
        ctx.close(state, expected, "state dict", 1e-5 if trainer.exact else 1e3)
        for name, value in expected.items():
            ctx.equal(state[name].dtype, value.dtype, f"dtype of {name}")
    return f"{len(expected)} tensors"


@check("backend", needs="compile", hooks="prepare_model compile")
def compiled(ctx: CheckContext) -> None:
    """A compiled model trains as the plain one does."""
    trainer = Trainer.begin(ctx, dynamo_backend="eager")
    if trainer.exact:
        trainer.train_as_plain(2)
    else:
        trainer.train(trainer.batches(2)[0])
