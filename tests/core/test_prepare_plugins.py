"""Changes that plugins make to models, and how the optimizers follow them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from accelerate_core import Accelerator, Backend, KwargsHandler
from accelerate_core.errors import PluginError, PrepareError


class Recorder(Backend):
    """Records the order of the stages, and replaces all parameters in `convert`."""

    name = "recorder"
    api_version = (1, 0)
    reduces_gradients = "never"

    def __init__(self, settings: Any = None, handlers: Any = ()) -> None:
        super().__init__(settings, handlers)
        self.seen: list[str] = []

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        self.seen.append("convert")
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(parameter.detach().clone()))
        return model

    def tensor_parallel(self, model: torch.nn.Module) -> torch.nn.Module:
        self.seen.append("tensor_parallel")
        return model

    def activation_checkpointing(self, model: torch.nn.Module) -> torch.nn.Module:
        self.seen.append("activation_checkpointing")
        return model

    def compile(self, model: torch.nn.Module) -> torch.nn.Module:
        self.seen.append("compile")
        return model

    def prepare_model(self, model: torch.nn.Module) -> torch.nn.Module:
        self.seen.append("prepare_model")
        return torch.nn.Sequential(model)

    def unwrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return model[0] if type(model) is torch.nn.Sequential else model  # type: ignore[index]

    def state_attributes(self) -> Mapping[str, Any]:
        return {"recorder_plugin": self.seen}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.body(x)))
        return out


def groups_of(model: Net) -> list[dict[str, Any]]:
    return [
        {"params": list(model.body.parameters()), "lr": 0.5},
        {"params": list(model.head.parameters()), "momentum": 0.7},
    ]


def test_stages_run_in_order_and_optimizers_are_rebound_by_name() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(groups_of(model), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    kept = optimizer.state[model.body.weight]["momentum_buffer"]
    accelerator = Accelerator(backend=Recorder)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    assert accelerator.backend.seen == [  # type: ignore[attr-defined]
        "convert", "tensor_parallel", "activation_checkpointing", "compile", "prepare_model",
    ]  # fmt: skip
    assert accelerator.recorder_plugin is accelerator.state.recorder_plugin
    assert wrapped.optimizer is optimizer
    assert wrapped.param_groups[0]["params"] == [model.body.weight, model.body.bias]
    assert [(g["lr"], g["momentum"]) for g in wrapped.param_groups] == [(0.5, 0.9), (0.1, 0.7)]
    assert optimizer.state[model.body.weight]["momentum_buffer"] is kept
    before = [p.detach().clone() for p in model.parameters()]
    wrapped.zero_grad()
    accelerator.backward(prepared(torch.ones(1, 3)).sum())
    wrapped.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert accelerator.unwrap_model(prepared) is model


def test_optimizer_prepared_later_is_rebound() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(backend=Recorder)
    accelerator.prepare(model)
    wrapped = accelerator.prepare(optimizer)
    assert wrapped.param_groups[0]["params"] == list(model.parameters())


class Renames(Recorder):
    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        model.tail = model.head
        del model.head
        return model


class Adds(Recorder):
    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        model.extra = torch.nn.Linear(1, 1)
        return model


class Forgets(Recorder):
    def convert(self, model: torch.nn.Module) -> Any:
        return None


@pytest.mark.parametrize(
    ("backend", "kind", "expected"),
    [
        (Renames, PrepareError, "An optimizer holds parameter 'head.weight'"),
        (Adds, PrepareError, "extra.weight"),
        (Forgets, PluginError, "a stage must return the model"),
    ],
)
def test_stage_that_would_leave_a_parameter_untrained_is_refused(
    backend: type[Backend], kind: type[Exception], expected: str
) -> None:
    model = Net()
    with pytest.raises(kind, match=expected):
        Accelerator(backend=backend).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_parameter_missing_from_the_users_optimizer_is_a_warning() -> None:
    model = Net()
    with pytest.warns(
        UserWarning, match=r"2 trainable parameter\(s\) of Net, such as 'body.weight'"
    ):
        Accelerator().prepare(model, torch.optim.SGD(model.head.parameters(), lr=0.1))


class Token:
    """An object that only a plugin can prepare."""

    param_groups: list[Any] = []


class Classifies(Backend):
    name = "classifies"
    api_version = (1, 0)
    reduces_gradients = "never"

    def classify(self, obj: Any) -> str | None:
        return "optimizer" if isinstance(obj, Token) else None

    def prepare_optimizer(self, optimizer: Any) -> Any:
        real = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        return real if isinstance(optimizer, Token) else optimizer


def test_plugin_can_prepare_its_own_types() -> None:
    wrapped = Accelerator(backend=Classifies).prepare(Token())
    assert isinstance(wrapped.optimizer, torch.optim.SGD)


@dataclass
class VendorKwargs(KwargsHandler):
    level: int = 3


class Vendor(Backend):
    name = "vendor"
    api_version = (1, 0)
    reduces_gradients = "never"
    handlers = (VendorKwargs,)


def test_handler_of_a_third_party_plugin_reaches_it() -> None:
    handler = VendorKwargs(level=7)
    backend = Accelerator(backend=Vendor, kwargs_handlers=[handler]).backend
    assert backend.given_handlers == (handler,)
    assert handler.to_kwargs() == {"level": 7}
