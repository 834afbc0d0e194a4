"""Backends train with everything they accept, and precisions do what they declare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from accelerate_core.contract.capabilities import ACCEPTED_BY_DEFAULT
from accelerate_core.plugin import API_VERSION, Precision, listing
from accelerate_core.plugins import devices
from accelerate_core.plugins.discovery import Installed, PluginRecord
from accelerate_testing.checks import STEP, check
from accelerate_testing.context import CheckContext
from accelerate_testing.counting import count_communication
from accelerate_testing.training import MOMENTUM, RATE, Net, Trainer, optimizer_of


class _Probe(Precision):
    """A precision that needs one word and computes the same as full precision."""

    api_version = API_VERSION
    exact = True

    def reached(self, trainer: Trainer) -> bool:
        """Return whether what it did is still in effect in training."""
        return True


class _Linear(nn.Linear):
    """A layer that replaces another one."""


class _Modules(_Probe):
    name = "suite_modules"
    needs = frozenset({"modules"})

    def convert(self, model: nn.Module) -> nn.Module:
        for parent in [*model.modules()]:
            for name, child in [*parent.named_children()]:
                if type(child) is nn.Linear:
                    made = _Linear(child.in_features, child.out_features, device="meta")
                    made.weight = child.weight
                    made.bias = child.bias
                    setattr(parent, name, made)
        return model

    def reached(self, trainer: Trainer) -> bool:
        inner = trainer.accelerator.unwrap_model(trainer.model)
        return any(isinstance(module, _Linear) for module in inner.modules())


class _Parameters(_Probe):
    name = "suite_parameters"
    needs = frozenset({"parameters"})
    exact = False

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def convert(self, model: nn.Module) -> nn.Module:
        model.register_forward_pre_hook(lambda _, given: tuple(x.bfloat16() for x in given))
        return model.bfloat16()

    def plain_state(self, model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        return {name: value.float() for name, value in state.items()}


class _Marked(torch.Tensor):
    """A subclass of Tensor."""


class _Subclasses(_Probe):
    name = "suite_subclasses"
    needs = frozenset({"subclasses"})

    def convert(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            for name, parameter in [*module.named_parameters(recurse=False)]:
                marked = parameter.detach().as_subclass(_Marked)
                setattr(module, name, nn.Parameter(marked, parameter.requires_grad))
        return model

    def plain_state(self, model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        return {name: value.as_subclass(torch.Tensor) for name, value in state.items()}


class _SGD(torch.optim.SGD):
    """An optimizer that replaces another one."""


class _Optimizer(_Probe):
    name = "suite_optimizer"
    needs = frozenset({"optimizer"})

    def prepare(self, accelerator: Any, plan: Any) -> None:
        def replaced(optimizer: Any, _: Any) -> Any:
            groups = [{**group} for group in optimizer.param_groups]
            return _SGD(groups, RATE, MOMENTUM)

        plan.each("optimizer", replaced)

    def reached(self, trainer: Trainer) -> bool:
        return isinstance(trainer.optimizer.optimizer, _SGD)


class _Collectives(_Probe):
    name = "suite_forward_collectives"
    needs = frozenset({"forward_collectives"})

    def prepare(self, accelerator: Any, plan: Any) -> None:
        def largest(_: nn.Module, given: Any) -> None:
            accelerator.reduce(given[0].detach().abs().amax(), "max")

        for model in plan.values("model"):
            model.register_forward_pre_hook(largest)


_PROBES: tuple[type[_Probe], ...] = (
    _Modules, _Parameters, _Subclasses, _Optimizer, _Collectives,
)  # fmt: skip


@contextmanager
def _installed(probes: Sequence[type[Precision]]) -> Iterator[None]:
    """Make the suite's precisions available in addition to the installed ones."""
    own = Installed.of_kind
    records = tuple(
        PluginRecord("precision", probe.name, "", "accelerate-testing", "", loaded=probe)
        for probe in probes
    )

    def of_kind(self: Installed, kind: str) -> tuple[PluginRecord, ...]:
        return (*own(self, kind), *(records if kind == "precision" else ()))

    plugin_of = devices.device_plugin

    def device_plugin(kind: str) -> Any:
        plugin = plugin_of(kind)
        plugin.precisions = None  # they compute in float32, but a device can't list their names
        return plugin

    with (
        mock.patch.object(Installed, "of_kind", of_kind),
        mock.patch.object(devices, "device_plugin", device_plugin),
    ):
        yield


@check("backend", hooks=f"prepare prepare_model consolidate {STEP}")
def accepts(ctx: CheckContext) -> str:
    """It trains correctly with precisions that do what it accepts."""
    accepted = {*ctx.supports.get("accepts", ACCEPTED_BY_DEFAULT)}
    probes = [probe for probe in _PROBES if probe.needs <= accepted]
    if not probes:
        ctx.skip("it accepts nothing beyond what the check 'precisions' covers")
    with _installed(probes):
        for probe in probes:
            (word,) = probe.needs
            trainer = Trainer.begin(ctx, mixed_precision=probe.name)
            try:
                _train(trainer, trainer.exact and probe.exact)
            except AssertionError as error:
                raise AssertionError(f"with a precision that needs {word!r}, {error}") from None
            gone = f"after prepare, the effect of a precision that needs {word!r} is gone"
            used = trainer.accelerator.precision
            assert isinstance(used, probe)
            assert used.reached(trainer), gone
            trainer.accelerator.end_training()
    return ", ".join(word for probe in probes for word in probe.needs)


def _train(trainer: Trainer, exact: bool) -> None:
    if exact:
        trainer.train_as_plain(3)
        return
    losses = trainer.train(trainer.batches(2)[0] * 6)
    trainer.ctx.alike(trainer.accelerator, losses, "losses")
    went = f"the loss went from {losses[0]:.3g} to {losses[-1]:.3g}"
    assert sum(losses[-2:]) < sum(losses[:2]), went
    if trainer.exact:
        trainer.same_everywhere("the trained model")


@check("precision", alone=True, hooks="convert")
def needs(ctx: CheckContext) -> str:
    """Its `needs` declare everything that it does to models and optimizers, and it does some of that."""
    accelerator = ctx.accelerator(backend="single")
    net: Any = Net(0)
    before: Any = optimizer_of(ctx)(net.parameters())
    model, optimizer = accelerator.prepare(net, before)
    inner = accelerator.unwrap_model(model)
    layers, its = ({name: type(m) for name, m in one.named_modules()} for one in (inner, Net(0)))
    parameters = [*inner.parameters()]
    seen_autocast: list[bool] = []
    kind = accelerator.device.type
    # The innermost layer, which runs under whatever autocast the model's forward enters.
    layer: Any = next(m for m in inner.modules() if not [*m.children()])
    layer.register_forward_pre_hook(
        lambda *_: seen_autocast.append(torch.is_autocast_enabled(kind))
    )
    model(torch.ones(2, 6, device=accelerator.device))
    done = {
        "autocast": any(seen_autocast),
        "modules": layers != its,
        "parameters": any(one.dtype != torch.float32 for one in parameters),
        "subclasses": any(type(one) is not nn.Parameter for one in parameters),
        "optimizer": optimizer.optimizer is not before,
        "loss_scaling": accelerator.scaler is not None,
    }
    said = accelerator.precision.needs
    silent = [word for word in done if done[word] and word not in said]
    assert not silent, (
        f"it does {listing(silent)}, which its `needs` do not declare. Add it there, or it will be used "
        "with backends that don't support it."
    )
    unseen = [word for word in done if word in said and not done[word]]
    observable = [word for word in done if word in said]
    assert not observable or unseen != observable, (
        f"its `needs` declare {listing(observable)}, but it has no such effect on a model of "
        "linear layers and its optimizer, so it trains in full precision"
    )
    seen = ", ".join(sorted(said.difference(unseen))) or "nothing"
    return f"{seen}; not observed here: {', '.join(unseen)}" if unseen else seen


@check("precision", hooks="convert autocast")
def forward_collectives(ctx: CheckContext) -> str:
    """A forward communicates no more than in full precision, unless its `needs` declare it."""
    calls = []
    for name in ("no", ctx.name):
        trainer = Trainer.begin(ctx, mixed_precision=name)
        ((batch, _),) = trainer.batches(1)[0]
        trainer.model(batch)
        with count_communication() as told:
            trainer.model(batch)
        calls.append(told.total)
        said = trainer.accelerator.precision.needs
        trainer.accelerator.end_training()
    line = f"{calls[1]} collectives in a forward, {calls[0]} in full precision"
    assert calls[1] <= calls[0] or "forward_collectives" in said, (
        f"{line}, but `needs` does not contain 'forward_collectives': {sorted(said)}"
    )
    return line


@check("precision", alone=True, hooks="convert compile")
def compiled(ctx: CheckContext) -> None:
    """A compiled model trains like the plain one, unless it declares that it cannot be compiled."""
    losses = []
    for compiler in ("no", "eager"):
        trainer = Trainer.begin(ctx, dynamo_backend=compiler)
        if not trainer.accelerator.precision.supports.get("compile", True):
            ctx.skip("it does not declare 'compile'")
        losses.append(trainer.train(trainer.batches(3)[0]))
        trainer.accelerator.end_training()
    ctx.close(losses[1], losses[0], "losses of a compiled model", 0.05 * losses[0][0])
