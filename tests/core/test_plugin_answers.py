"""The core's checks of what hooks return while a script runs."""

from __future__ import annotations

import enum
import functools
import math
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate_core import Accelerator, Backend
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.distributed.digest import comparable
from accelerate_core.errors import PluginError


class Mode(enum.Enum):
    FAST = "fast"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": [1, 2]}, {"b": (1, 2), "a": 1}),
        ({3, 1, 2}, {1, 2, 3}),
        (Mode.FAST, Mode.FAST),
        (object(), object()),
        (math.nan, math.nan),
        (torch.float32, torch.float32),
    ],
)
def test_equal_settings_compare_equal(one: Any, other: Any) -> None:
    assert comparable(one) == comparable(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": 2}),
        ([1, 2], [2, 1]),
        ({"a": {"b": ["x" * 300, 1]}}, {"a": {"b": ["x" * 300, 2]}}),
        (print, len),
        (functools.partial(print, 1), functools.partial(print, 2)),
        (torch.float32, torch.float16),
    ],
)
def test_different_settings_compare_unequal(one: Any, other: Any) -> None:
    assert comparable(one) != comparable(other)


class Base(Backend):
    name = "answers"
    api_version = (1, 0)
    reduces_gradients = "backward"


def train(backend: Any, steps: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Accelerator(cpu=True, backend=backend) as accelerator:
            model = torch.nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model, optimizer = accelerator.prepare(model, optimizer)
            for _ in range(steps):
                accelerator.backward(model(torch.ones(1, 2)).sum())
                optimizer.step()
                optimizer.zero_grad()
    return [str(one.message) for one in caught if "optimizer_step" in str(one.message)]


class StepsAndDenies(Base):
    def optimizer_step(self, accelerator: Any, optimizer: Any, closure: Any) -> bool:
        super().optimizer_step(accelerator, optimizer, closure)
        return False


class NeverSteps(Base):
    def optimizer_step(self, accelerator: Any, optimizer: Any, closure: Any) -> bool:
        return False


def test_step_that_is_reported_as_skipped_but_changes_parameters_is_named() -> None:
    (text,) = train(StepsAndDenies, 5)
    assert "optimizer_step of backend 'answers' returned False" in text
    assert "although the step changed the parameters" in text


def test_backend_that_skips_every_step_is_named_after_twenty_steps() -> None:
    assert train(NeverSteps, 19) == []
    (text,) = train(NeverSteps, 40)
    assert "20 times in a row, although no loss scale is active" in text
    assert train(Base, 30) == []


def test_hook_on_an_instance_overrides_the_default() -> None:
    backend = Base()
    backend.no_sync = lambda accelerator, model: torch.enable_grad()  # type: ignore[method-assign]
    with Accelerator(cpu=True, backend=backend) as accelerator:
        assert accelerator.hooks.is_overridden("no_sync")
        assert not accelerator.hooks.is_overridden("feed_device")


@pytest.mark.parametrize(
    ("hook", "answer"),
    [
        ("gather", lambda tensor, scope: torch.cat([tensor, tensor]).double()),
        ("gather", lambda tensor, scope: tensor),
        ("reduce", lambda tensor, op, scope: tensor[:1]),
        ("broadcast", lambda tensor, src, scope: tensor.double()),
        ("all_to_all", lambda tensor, scope: tensor[:1]),
    ],
)
def test_collective_with_another_size_or_dtype_is_named(hook: str, answer: Any) -> None:
    hooks: Any = SimpleNamespace(**{hook: answer})
    comm = Communicator(rank=0, size=2, device=torch.device("cpu"), hooks=hooks, backend="answers")
    with pytest.raises(PluginError, match=f"{hook} of backend 'answers' returned .* elements of"):
        getattr(comm, hook)(torch.ones(4))


def test_gather_object_with_too_few_objects_is_named() -> None:
    hooks: Any = SimpleNamespace(gather_object=lambda obj, scope: [obj])
    comm = Communicator(rank=0, size=2, device=torch.device("cpu"), hooks=hooks)
    with pytest.raises(PluginError, match=r"returned 1 objects.*each of the 2 ranks"):
        comm.gather_object("x")


class Shares(Base):
    def data_shard(self, runtime: Any) -> tuple[int, int]:
        return 0, 4


def test_data_shard_larger_than_the_world_is_refused() -> None:
    with pytest.raises(PluginError, match=r"data_shard of backend 'answers' returned \(0, 4\)"):
        Accelerator(cpu=True, backend=Shares)


class Hides(Base):
    def state_attributes(self, accelerator: Any) -> dict[str, Any]:
        return {"device": "mine", "own": 1}


def test_state_attribute_that_the_accelerator_already_has_is_named() -> None:
    with pytest.warns(UserWarning, match="serves the attribute 'device'"):
        accelerator = Accelerator(cpu=True, backend=Hides)
    with accelerator:
        assert accelerator.own == 1  # type: ignore[attr-defined]
        assert str(accelerator.device) == "cpu"
