"""Small plugins that use `prepare` and the step like Megatron, fp8 and pipelines."""

from __future__ import annotations

import dataclasses
import json
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from accelerate_core import Accelerator, Backend, KwargsHandler, Precision, set_seed
from accelerate_core.accelerator import construction
from accelerate_core.contract.schedule import ScheduleResult, ScheduleStep
from accelerate_core.errors import PluginError, PrepareError
from accelerate_core.plugins import discovery, selection
from accelerate_core.plugins.discovery import PluginRecord
from accelerate_core.training.scheduler import AcceleratedScheduler

X, Y = torch.randn(16, 4), torch.randn(16, 2)


class Plain(Backend):
    """Base class of the plugins in this file."""

    name = "plain"
    api_version = (1, 0)
    reduces_gradients = "never"


# --- model providers ------------------------------------------------------------------------------


class Provider:
    """Creates a model on request, as Megatron's model providers do."""

    def make(self) -> nn.Module:
        return nn.Linear(4, 2)


class Provides(Plain):
    def classify(self, obj: Any) -> str | None:
        return "model" if isinstance(obj, Provider) else None

    def make_model(self, obj: Any) -> nn.Module:
        module: nn.Module = obj.make() if isinstance(obj, Provider) else obj
        return module


def test_model_provider_is_replaced_by_its_model() -> None:
    accelerator = Accelerator(cpu=True, backend=Provides)
    model = accelerator.prepare(Provider())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
    before = model.weight.detach().clone()
    accelerator.backward(mse_loss(model(X), Y))
    optimizer.step()
    assert not torch.equal(model.weight, before)
    assert accelerator.unwrap_model(model) is model


# --- renamed and fused parameters -----------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 2, bias=False), nn.Linear(4, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x) * self.k(x)


class Fused(nn.Module):
    def __init__(self, split: Attention) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.cat([split.q.weight, split.k.weight]).detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = (x @ self.qk.T).chunk(2, dim=-1)
        return q * k


class Fuses(Plain):
    says = True

    def prepare(self, accelerator: Any, plan: Any) -> None:
        plan.each("model", lambda model, _: Fused(model))
        if self.says:
            plan.rename(plan.values("model")[0], {"q.weight": "qk", "k.weight": "qk"})


class FusesWithoutRename(Fuses):
    says = False


def prepared(backend: type[Backend], groups: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, backend=backend)
    model = Attention()
    plain = nn.ModuleList([Attention()])[0]
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(groups(model), 0.1, momentum=0.9)
    return (accelerator, plain, *accelerator.prepare(model, optimizer))


def test_fused_parameters_are_stepped_like_the_originals() -> None:
    accelerator, plain, model, optimizer = prepared(Fuses, lambda m: m.parameters())
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
    reference = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        accelerator.backward(mse_loss(model(X), Y))
        mse_loss(plain(X), Y).backward()
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    weights = torch.cat([plain.q.weight, plain.k.weight])
    torch.testing.assert_close(model.qk, weights)


def test_parameters_with_different_hyperparameters_cannot_be_fused() -> None:
    def groups(model: Attention) -> list[dict[str, Any]]:
        return [
            {"params": model.q.parameters(), "lr": 0.1},
            {"params": model.k.parameters(), "lr": 0.2},
        ]

    with pytest.raises(PrepareError, match=r"'k\.weight' and others were merged into 'qk'.* lr"):
        prepared(Fuses, groups)


def test_undeclared_rename_of_a_parameter_is_an_error() -> None:
    with pytest.raises(
        PrepareError, match=r"has no parameter with that name anymore.*plan\.rename"
    ):
        prepared(FusesWithoutRename, lambda m: m.parameters())


# --- tied parameters ------------------------------------------------------------------------------


class Copies(Plain):
    """Creates a new parameter for each name, as some conversions do."""

    def convert(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.detach().clone()))
        return model


def test_tied_parameters_stay_tied() -> None:
    accelerator = Accelerator(cpu=True, backend=Copies)
    net = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    net[1].weight = net[0].weight
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    assert model[1].weight is model[0].weight
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [id(parameter) for parameter in held] == [id(model[0].weight)]


# --- replaced optimizers --------------------------------------------------------------------------


class Replaces(Plain):
    def prepare_optimizer(self, accelerator: Any, optimizer: Any) -> Any:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return torch.optim.SGD(parameters, optimizer.defaults["lr"])


@pytest.mark.parametrize("chained", [False, True])
def test_schedulers_follow_a_replaced_optimizer(chained: bool) -> None:
    accelerator = Accelerator(cpu=True, backend=Replaces)
    net = nn.Linear(4, 2)
    sgd = torch.optim.SGD(net.parameters(), 1.0)
    decay: Any = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
    if chained:
        decay = torch.optim.lr_scheduler.SequentialLR(
            sgd, [decay, torch.optim.lr_scheduler.ConstantLR(sgd, 1.0)], milestones=[9]
        )
    model, optimizer, scheduler = accelerator.prepare(net, sgd, decay)
    assert optimizer.optimizer is not sgd
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no warning from torch about a missed optimizer.step()
        for _ in range(2):
            accelerator.backward(mse_loss(model(X), Y))
            optimizer.step()
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_scheduler_that_steps_before_its_replaced_optimizer_is_warned_about() -> None:
    accelerator = Accelerator(cpu=True, backend=Replaces)
    net = nn.Linear(4, 2)
    sgd = torch.optim.SGD(net.parameters(), 1.0)
    decay = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
    _, optimizer, scheduler = accelerator.prepare(net, sgd, decay)
    assert optimizer.param_groups[0]["lr"] == 1.0
    with pytest.warns(UserWarning, match=r"before `optimizer\.step\(\)`"):
        scheduler.step()


class Wraps(Replaces):
    """Wraps schedulers, as a backend does that steps them at its own pace."""

    def prepare_scheduler(self, accelerator: Any, scheduler: Any) -> Any:
        return AcceleratedScheduler(scheduler, [], gradient_state=accelerator.gradient_state)


def test_scheduler_wrapped_by_a_backend_follows_a_replaced_optimizer() -> None:
    accelerator = Accelerator(cpu=True, backend=Wraps)
    net = nn.Linear(4, 2)
    sgd = torch.optim.SGD(net.parameters(), 1.0)
    decay = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
    model, optimizer, scheduler = accelerator.prepare(net, sgd, decay)
    accelerator.backward(mse_loss(model(X), Y))
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert scheduler.scheduler.optimizer is optimizer.optimizer


# --- engines that run forward and backward --------------------------------------------------------


class MicroBatches(Plain):
    """Runs forward and backward over micro-batches, as a pipeline does."""

    supports = {"no_sync": True}

    def run_schedule(
        self, accelerator: Any, model: nn.Module, batch: Any, step: ScheduleStep
    ) -> ScheduleResult:
        losses, outputs = [], []
        for x, y in zip(batch[0].chunk(4), batch[1].chunk(4), strict=True):
            out = model(x)
            loss = mse_loss(out, y, reduction="sum" if step.counted else "mean")
            if step.training:
                (step.divide(loss) / (1 if step.counted else 4)).backward()
            losses.append(loss.detach())
            outputs.append(out.detach())
        return ScheduleResult(torch.stack(losses).mean(), torch.cat(outputs))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_pipeline_schedule_trains_like_one_batch(accumulation: int) -> None:
    runs = []
    for backend in (MicroBatches, Plain):
        torch.manual_seed(0)
        accelerator = Accelerator(
            cpu=True, backend=backend, gradient_accumulation_steps=accumulation
        )
        net = nn.Linear(4, 2)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        losses, stepped = [], 0
        for _ in range(4):
            with accelerator.accumulate(model):
                if backend is MicroBatches:
                    loss, outputs = accelerator.train_step((X, Y))
                    assert outputs.shape == (16, 2)
                else:
                    loss = mse_loss(model(X), Y)
                    accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                before = net.weight.detach().clone()
                optimizer.step()
                stepped += not torch.equal(before, net.weight)
                optimizer.zero_grad()
            losses.append(loss.detach())
        assert stepped == 4 // accumulation
        runs.append(torch.stack(losses))
        with torch.no_grad():
            if backend is MicroBatches:
                assert accelerator.eval_step((X, Y)).loss.ndim == 0
                assert all(p.grad is None for p in net.parameters())
    torch.testing.assert_close(*runs)


def test_pipeline_schedule_divides_the_loss_by_the_number_of_items() -> None:
    gradients = []
    for counted in (True, False):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, backend=MicroBatches)
        net = nn.Linear(4, 2)
        model, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        with accelerator.accumulate(model, num_items=Y.numel() if counted else None):
            accelerator.train_step((X, Y))
        assert net.weight.grad is not None
        gradients.append(net.weight.grad)
    torch.testing.assert_close(*gradients)


# --- additional random generators -----------------------------------------------------------------


class Draws(Plain):
    """Has its own random generator, like a tensor-parallel backend."""

    def __init__(self, settings: Any = None, handlers: Any = ()) -> None:
        super().__init__(settings, handlers)
        self.random = random.Random(0)

    def rng_state(self, accelerator: Any) -> dict[str, Any]:
        return {"position": torch.tensor(self.random.getstate()[1])}

    def load_rng_state(self, accelerator: Any, state: Any) -> None:
        self.random.setstate((3, tuple(state["position"].tolist()), None))

    def on_seed(self, accelerator: Any, seed: int) -> None:
        self.random.seed(seed)


def test_random_generators_of_a_backend_are_seeded_saved_and_restored(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, backend=Draws)
    set_seed(5)
    assert accelerator.backend.random.random() == random.Random(5).random()
    accelerator.save_state(tmp_path / "state")
    expected = [accelerator.backend.random.random() for _ in range(3)]
    accelerator.load_state(tmp_path / "state")
    assert [accelerator.backend.random.random() for _ in range(3)] == expected
    accelerator.end_training()


def test_world_has_one_device_per_process_unless_its_backend_declares_more() -> None:
    class Wide(Plain):
        def device_count(self, accelerator: Any) -> int:
            return 4

    assert Accelerator(cpu=True, backend=Plain).device_count == 1
    assert Accelerator(cpu=True, backend=Wide).device_count == 4


@pytest.mark.parametrize(
    ("hook", "answer", "ask"),
    [
        ("device_count", "2", lambda accelerator: accelerator.device_count),
        ("device_count", 0, lambda accelerator: accelerator.device_count),
        ("fixed_batch", "8", lambda accelerator: accelerator.prepare(DataLoader(X, 4))),
        ("fixed_batch", 0, lambda accelerator: accelerator.prepare(DataLoader(X, 4))),
        ("run_schedule", torch.tensor(1.0), lambda accelerator: accelerator.train_step(X, None)),
        ("run_schedule", ScheduleResult(torch.ones(2)), lambda one: one.eval_step(X, None)),
    ],
)
def test_invalid_result_of_a_hook_names_the_backend(hook: str, answer: Any, ask: Any) -> None:
    wrong = {"name": "wrong", hook: lambda self, accelerator: answer}
    with Accelerator(cpu=True, backend=type("Wrong", (Plain,), wrong)) as accelerator:
        accelerator.prepare(nn.Linear(4, 2))
        with pytest.raises(
            PluginError, match=f"{hook} of backend 'wrong' returned .*; it must return"
        ):
            ask(accelerator)


# --- precisions that replace the optimizer --------------------------------------------------------


class Halved(torch.optim.SGD):
    """The optimizer that the precision uses instead."""


class OwnOptimizer(Precision):
    name = "own_optimizer"
    api_version = (1, 0)
    needs = frozenset({"optimizer"})

    def prepare(self, accelerator: Any, plan: Any) -> None:
        def replaced(optimizer: Any, _: Any) -> Any:
            groups = [{**group} for group in optimizer.param_groups]
            return Halved(groups, optimizer.defaults["lr"])

        plan.each("optimizer", replaced)


def install(monkeypatch: pytest.MonkeyPatch, precision: type[Precision]) -> None:
    """Make a precision of this file appear as installed."""
    target = f"{__name__}:{precision.__name__}"
    record = PluginRecord("precision", precision.name, target, "tests", "1.0")
    there = discovery.installed()
    found = dataclasses.replace(there, plugins=(*there.plugins, record))
    for module in (discovery, selection, construction):
        monkeypatch.setattr(module, "installed", lambda: found)


class Recipe(KwargsHandler):
    """Settings that only one precision accepts."""


class WithRecipe(Precision):
    name = "with_recipe"
    api_version = (1, 0)
    handlers = (Recipe,)


def test_precision_is_created_with_its_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, WithRecipe)
    recipe = Recipe()
    made = Accelerator(cpu=True, mixed_precision="with_recipe", kwargs_handlers=[recipe])
    assert made.precision.given_handlers == (recipe,)


class Boxed(torch.Tensor):
    """A wrapper tensor without storage, so its address is 0."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Boxed:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Boxed, lambda boxed: boxed.inner, (args, kwargs or {}))
        out = func(*args, **kwargs)
        stays = func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
        return Boxed(out) if stays else out


class Boxing(Precision):
    name = "boxing"
    api_version = (1, 0)
    needs = frozenset({"subclasses"})

    def convert(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(Boxed(parameter.detach().clone())))
        return model

    def plain_state(self, model: nn.Module, state: Any) -> dict[str, Any]:
        return {name: getattr(value, "inner", value) for name, value in state.items()}


def test_tensors_without_storage_stay_tied_and_are_saved_as_plain_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, Boxing)
    accelerator = Accelerator(cpu=True, mixed_precision="boxing")
    net = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False))
    net[2].weight = net[0].weight
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 1.0))
    assert {parameter.data_ptr() for parameter in model.parameters()} == {0}
    assert model[2].weight is model[0].weight
    assert len(optimizer.param_groups[0]["params"]) == 3
    before = model[1].weight.inner.clone()
    accelerator.backward(model(torch.tensor([1, 2])).square().sum())
    optimizer.step()
    assert not torch.equal(model[1].weight.inner, before)
    state = accelerator.get_state_dict(model)
    assert {type(value) for value in state.values()} == {torch.Tensor}


def test_precision_can_replace_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, OwnOptimizer)
    accelerator = Accelerator(cpu=True, mixed_precision="own_optimizer")
    net = nn.Linear(4, 2)
    sgd = torch.optim.SGD(net.parameters(), 1.0)
    decay = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
    model, optimizer, scheduler = accelerator.prepare(net, sgd, decay)
    assert type(optimizer.optimizer) is Halved
    accelerator.backward(mse_loss(model(X), Y))
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


class ClipsItself(Precision):
    """Clips gradients itself."""

    name = "clips_itself"
    api_version = (1, 0)

    def clip_grad(
        self, parameters: Any, max_norm: Any, norm_type: float, clip_value: Any
    ) -> torch.Tensor:
        return torch.tensor([len(parameters), max_norm or 0.0, norm_type, clip_value or 0.0])


def test_precision_can_clip_gradients_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ClipsItself)
    accelerator = Accelerator(cpu=True, mixed_precision="clips_itself")
    model = accelerator.prepare(nn.Linear(4, 2))
    accelerator.backward(model(X).sum())
    assert accelerator.clip_grad_norm_(model.parameters(), 0.5, 1).tolist() == [2, 0.5, 1, 0]
    before = model.weight.grad.clone()
    accelerator.clip_grad_value_(model.parameters(), 1e-3)
    assert torch.equal(model.weight.grad, before)


# --- precisions with state and custom activation checkpointing ------------------------------------


class DelayedLinear(nn.Linear):
    """Divides its input by the largest value so far."""

    format: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x / self.format.largest)
        self.format.largest = max(self.format.largest * 0.9, float(x.detach().abs().max()))
        return out


class Delayed(Precision):
    """Updates a scaling factor in forward, like delayed scaling in fp8."""

    name = "delayed"
    api_version = (1, 0)
    needs = frozenset({"modules"})

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self.largest = 1.0

    def convert(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = DelayedLinear
                module.format = self  # type: ignore[assignment]
        return model

    def recompute(self, accelerator: Any) -> Any:
        return self._recompute

    def _recompute(self, function: Any, *args: Any) -> Any:
        before = self.largest

        @contextmanager
        def again() -> Iterator[None]:
            now, self.largest = self.largest, before
            try:
                yield
            finally:
                self.largest = now

        contexts = lambda: (nullcontext(), again())  # noqa: E731
        return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)

    def on_save(self, accelerator: Any, directory: Path) -> None:
        factors = directory / f"factors_{accelerator.process_index}.json"
        factors.write_text(json.dumps(self.largest))

    def on_load(self, accelerator: Any, directory: Path) -> None:
        factors = directory / f"factors_{accelerator.process_index}.json"
        self.largest = json.loads(factors.read_text())


class Recomputes(Plain):
    """Checkpoints activations with the precision's own method."""

    def activation_checkpointing(self, accelerator: Any, model: nn.Module) -> nn.Module:
        recompute = accelerator.precision.recompute(accelerator) or partial(
            checkpoint, use_reentrant=False
        )
        model.forward = partial(recompute, model.forward)
        return model


class Forgetful(Delayed):
    """Uses torch's checkpointing, which runs forward a second time."""

    name = "forgetful"

    def recompute(self, accelerator: Any) -> Any:
        return None


def delayed(backend: type[Backend], precision: str) -> tuple[Any, ...]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, backend=backend, mixed_precision=precision)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return accelerator, *accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))


def steps(accelerator: Any, model: nn.Module, optimizer: Any, count: int) -> list[float]:
    losses = []
    for index in range(count):
        loss = mse_loss(model(X * (index + 1)), Y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_activations_are_recomputed_by_the_precisions_own_method(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, Delayed)
    install(monkeypatch, Forgetful)
    plain, recomputed = delayed(Plain, "delayed"), delayed(Recomputes, "delayed")
    assert steps(*plain, 4) == steps(*recomputed, 4)
    assert plain[0].precision.largest == recomputed[0].precision.largest
    # With torch's checkpointing the factor would have been updated twice.
    assert steps(*delayed(Plain, "delayed"), 4) != steps(*delayed(Recomputes, "forgetful"), 4)
    assert Accelerator(cpu=True, mixed_precision="bf16").precision.recompute(None) is None


def test_scaling_factors_of_a_precision_are_saved_in_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, Delayed)
    run = delayed(Plain, "delayed")
    accelerator, model, _ = run
    steps(*run, 2)
    factor = accelerator.precision.largest
    accelerator.save_state(tmp_path / "state")
    kept = tmp_path / "state" / "precision_delayed" / "factors_0.json"
    assert json.loads(kept.read_text()) == factor
    assert not any("largest" in name for name in model.state_dict())
    losses = steps(*run, 3)
    assert accelerator.precision.largest != factor
    accelerator.load_state(tmp_path / "state")
    assert steps(*run, 3) == losses
    accelerator.end_training()


def test_already_wrapped_model_keeps_its_optimizer() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        accelerator = Accelerator(cpu=True, backend="ddp")
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
        model, optimizer = accelerator.prepare(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1))
        before = wrapped.module.weight.detach().clone()
        accelerator.backward(mse_loss(model(X), Y))
        optimizer.step()
        assert model is wrapped
        assert not torch.equal(before, wrapped.module.weight)
        accelerator.end_training()
    finally:
        torch.distributed.destroy_process_group()
