"""Accelerators are independent: they share nothing, leave nothing behind and reset nothing."""

from __future__ import annotations

import gc
import os
import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import case_names, check_case, run_workers
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accelerate_core import Accelerator, AcceleratorState, GradientState
from accelerate_core.distributed.process import running
from accelerate_core.errors import CheckpointError
from accelerate_core.plugins import selection
from accelerate_core.plugins.discovery import PluginRecord, find
from accelerate_core.utils import GradScalerKwargs
from accelerate_tracking import GeneralTracker

WORKER = Path(__file__).with_name("isolation_worker.py")

ONE = {"mixed_precision": "bf16", "gradient_accumulation_steps": 3}
OTHER = {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(init_scale=256.0)]}
PLAIN = {"gradient_accumulation_steps": 2}


def make(accelerator: Accelerator, seed: int = 0) -> tuple[Any, ...]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
    sgd = torch.optim.AdamW(net.parameters(), lr=1e-2)
    decay = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.9)
    data = TensorDataset(torch.randn(20, 8), torch.arange(20) % 4)
    return accelerator.prepare(net, sgd, decay, DataLoader(data, batch_size=4))


def training(accelerator: Accelerator, prepared: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Train two epochs, and yield the observable state after each micro-batch."""
    model, optimizer, scheduler, data = prepared
    for _ in range(2):
        for x, y in data:
            with accelerator.accumulate(model):
                output = model(x)
                loss = cross_entropy(output, y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            state = accelerator.gradient_state
            seen = (accelerator.sync_gradients, state.end_of_dataloader, scheduler.get_last_lr())
            yield (loss.item(), *seen, len(accelerator.gather_for_metrics(y)))


def alone(arguments: dict[str, Any]) -> list[tuple[Any, ...]]:
    with Accelerator(cpu=True, **arguments) as accelerator:
        return list(training(accelerator, make(accelerator)))


# --- two at once ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [(ONE, OTHER), (PLAIN, ONE), (OTHER, PLAIN)])
def test_two_accelerators_do_not_affect_each_other(first, second):
    expected = [alone(first), alone(second)]
    assert expected[0] != expected[1], "the two runs must differ, or this test shows nothing"
    with Accelerator(cpu=True, **first) as one, Accelerator(cpu=True, **second) as other:
        trainings = [training(a, make(a)) for a in (one, other)]
        seen: list[list[Any]] = [[], []]
        for step in zip(*trainings, strict=True):
            for mine, now in zip(seen, step, strict=True):
                mine.append(now)
        assert one.mixed_precision == first.get("mixed_precision", "no")
        assert (one.scaler is None) is (one.mixed_precision != "fp16")
    assert seen == expected


def test_one_accelerator_can_end_while_another_continues():
    expected = alone(PLAIN)
    with Accelerator(cpu=True, **PLAIN) as stays:
        steps = training(stays, make(stays))
        seen = [next(steps)]
        with Accelerator(cpu=True, **ONE) as leaves:
            make(leaves)
        seen += [next(steps)]
        leaves.end_training()  # a second end does nothing
        seen += list(steps)
    assert seen == expected


def test_model_can_be_prepared_by_two_accelerators():
    net = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    with Accelerator(cpu=True, mixed_precision="bf16") as mixed, Accelerator(cpu=True) as plain:
        assert mixed.prepare(net) is net
        rounded = net(x)
        mixed.unwrap_model(net, keep_fp32_wrapper=False)
        assert plain.prepare(net) is net
        assert not torch.equal(net(x), rounded)


def test_state_classes_return_the_state_of_the_latest_live_accelerator():
    with Accelerator(cpu=True, gradient_accumulation_steps=2) as one:
        with Accelerator(cpu=True, mixed_precision="bf16") as other:
            assert AcceleratorState().mixed_precision == "bf16"
            assert GradientState() is other.gradient_state
            assert type(other.gradient_state) is GradientState
            assert GradientState(num_steps=3) is not other.gradient_state
        assert AcceleratorState().mixed_precision == "no"
        assert GradientState() is one.gradient_state


# --- nothing is left behind -----------------------------------------------------------------------


def cycle() -> list[weakref.ref[Any]]:
    """Create an Accelerator, train a step and end it. Return references to objects that must be freed."""
    accelerator = Accelerator(cpu=True, **ONE)
    prepared = make(accelerator)
    next(training(accelerator, prepared))
    accelerator.end_training()
    held = [accelerator, accelerator.gradient_state, accelerator.backend, *prepared]
    return [weakref.ref(one) for one in held]


def test_fifty_accelerators_leak_nothing():
    tracemalloc.start()
    try:
        # Python's attribute cache keeps recently used names. Fill it while tracing, because
        # otherwise replaced entries look like a leak.
        for _ in range(50):
            cycle()
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        references = [one for _ in range(50) for one in cycle()]
        gc.collect()
        alive = [reference() for reference in references if reference() is not None]
        assert alive == []
        del references, alive
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 50_000, "more than 1,000 bytes for each is a leak"
    assert running() is None


def test_accelerators_are_freed_without_being_closed():
    references = [weakref.ref(Accelerator(cpu=True)) for _ in range(10)]
    gc.collect()
    assert [reference() for reference in references] == [None] * 10


def test_accelerator_does_not_write_environment_variables(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    before = dict(os.environb)
    order = list(os.environb)
    with Accelerator(cpu=True, mixed_precision="bf16", dynamo_backend="eager") as accelerator:
        assert accelerator.gradient_accumulation_steps == 2
        assert dict(os.environb) == before
        assert list(os.environb) == order
        next(training(accelerator, make(accelerator)))
    if b"TORCHINDUCTOR_CACHE_DIR" not in before:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets this itself
    assert dict(os.environb) == before


def test_failed_construction_leaves_nothing_behind():
    for wrong in ({"mixed_precision": "fp61"}, {"colour": 1}, {"gradient_accumulation_steps": 0}):
        with pytest.raises((ValueError, TypeError)):
            Accelerator(cpu=True, **wrong)
    gc.collect()
    assert running() is None
    with Accelerator(cpu=True) as accelerator:
        assert accelerator.mixed_precision == "no"


# --- the end --------------------------------------------------------------------------------------


class RecordingTracker(GeneralTracker):
    """Records how it was ended."""

    name = "recording"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.lines

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.lines.append(("config", values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.lines.append((step, values))

    def finish(self) -> None:
        self.lines.append("finished")

    def finish_failed(self) -> None:
        self.lines.append("failed")


def test_leaving_the_with_block_ends_training():
    lines = []
    for by_hand in (True, False):
        tracker_log = RecordingTracker()
        with Accelerator(cpu=True, log_with=tracker_log) as accelerator:
            accelerator.init_trackers("project", {"lr": 0.1})
            accelerator.log({"loss": 1.0}, step=3)
            assert running() is not None
            if by_hand:
                accelerator.end_training()
                assert running() is None
        assert running() is None
        lines.append(tracker_log.lines)
    assert lines[0] == lines[1]
    assert lines[0] == [("config", {"lr": 0.1}), (3, {"loss": 1.0}), "finished"]


@pytest.mark.parametrize("error", [ValueError("lost"), KeyboardInterrupt()])
def test_trackers_learn_that_the_run_failed(error):
    tracker_log = RecordingTracker()
    accelerator = Accelerator(cpu=True, log_with=tracker_log)
    accelerator.init_trackers("project")
    with pytest.raises(type(error)) as caught, accelerator:
        raise error
    assert caught.value is error
    assert tracker_log.lines[-1] == "failed"
    assert "finished" not in tracker_log.lines
    accelerator.end_training()
    assert tracker_log.lines.count("failed") == 1


class Unclosable:
    """A checkpointer whose last save fails at the end."""

    name = "unclosable"
    api_version = (1, 0)
    preemption_requested = False

    def __init__(self, project: Any, signals: str | None) -> None:
        pass

    def attach(self, *arguments: Any) -> None:
        pass

    save_state = load_state = save = save_model = wait = release = attach

    def close(self, failed: bool) -> None:
        raise CheckpointError("the disk is full")


@pytest.mark.parametrize("by_error", [False, True])
def test_everything_ends_even_if_the_checkpointer_cannot_close(by_error, monkeypatch):
    record = PluginRecord("checkpointer", "unclosable", f"{__name__}:Unclosable", "tests", "1.0")

    def found(kind: str, name: str, **more: Any) -> PluginRecord:
        return record if kind == "checkpointer" else find(kind, name, **more)

    monkeypatch.setattr(selection, "find", found)
    tracker_log = RecordingTracker()
    accelerator = Accelerator(cpu=True, log_with=tracker_log, checkpointer="unclosable")
    accelerator.init_trackers("project")
    with pytest.raises(CheckpointError, match="the disk is full") as caught, accelerator:
        1 / (0 if by_error else 1)
    assert tracker_log.lines[-1] == ("failed" if by_error else "finished")
    assert isinstance(caught.value.__context__, ZeroDivisionError) == by_error
    users = [] if running() is None else [ref() for ref in running().users]
    assert (accelerator in users) == by_error  # after an error, the other ranks are not waited for
    accelerator.end_training()  # a second end does nothing
    assert tracker_log.lines.count("finished") + tracker_log.lines.count("failed") == 1


def test_another_device_is_refused_while_an_accelerator_runs():
    with Accelerator(cpu=True) as first:
        with Accelerator(cpu=True) as second:
            assert second.device == first.device
        with Accelerator() as third:
            assert third.device == first.device, (
                "without an explicit device, the running one is used"
            )


# --- two ranks ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    return run_workers(WORKER, 2, timeout=150)


@pytest.mark.dist
@pytest.mark.parametrize("case", case_names(WORKER))
def test_case(run, case):
    check_case(run, case)
