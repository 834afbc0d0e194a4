"""Ranks that step prepared schedulers with their own metrics."""

from __future__ import annotations

import contextlib
import io
import math
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, ReduceLROnPlateau
from worker import PG_TIMEOUT, RANK, SIZE, case, run_cases

from accelerate_core import Accelerator
from accelerate_core.errors import ConfigurationError

MEAN = (SIZE - 1) / 2


class Scores(NamedTuple):
    loss: float
    steps: int


class Recorder:
    """A scheduler of no library, which records what it gets."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.seen: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def get_last_lr(self) -> list[float]:
        return [0.0]


class WithScore(Recorder):
    def step(self, val_score: Any, epoch: int | None = None) -> None:
        self.seen.append((val_score, epoch))


class WithEpochFirst(Recorder):
    def step(self, epoch: int | None = None, metrics: Any = None) -> None:
        self.seen.append((metrics, epoch))


class Open(Recorder):
    def step(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append((args[0], kwargs.get("epoch")))


def prepared(make: Any, **arguments: Any) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT, **arguments)
    net = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(net, sgd, make(sgd))


def train(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    optimizer.zero_grad()


@case
def plateau_gets_one_metric_on_all_ranks() -> None:
    def up_on_one(step: int) -> float:
        return 1.0 + (step if RANK else -step)

    kinds = {
        "float": float,
        "tensor": torch.tensor,
        "float16 tensor of shape [1]": lambda value: torch.tensor([value], dtype=torch.float16),
        "NumPy scalar": np.float32,
        "NumPy array": np.array,
        "integer": int,
        "nan on one rank": lambda value: math.nan if RANK else value,
        "infinite on one rank": lambda value: math.inf if RANK else value,
        "loss with a graph": lambda value: torch.tensor(value, requires_grad=True) * 1,
    }
    for follows in (True, False):
        for name, kind in kinds.items():
            accelerator, model, optimizer, scheduler = prepared(
                lambda sgd: ReduceLROnPlateau(sgd, patience=0, factor=0.5),
                step_scheduler_with_optimizer=follows,
            )
            with accelerator:
                for step in range(4):
                    train(accelerator, model, optimizer)
                    if RANK % 2:
                        scheduler.step(metrics=kind(up_on_one(step)))
                    else:
                        scheduler.step(kind(up_on_one(step)))
                found = accelerator.communicator.gather_object(optimizer.param_groups[0]["lr"])
                assert len(set(found)) == 1, (name, follows, found)
                # On two ranks, the mean does not change.
                assert SIZE > 2 or found[0] < 0.1, (name, found)


@case
def metric_keeps_its_type() -> None:
    values = {
        float: (float(RANK), MEAN),
        np.float32: (np.float32(RANK), MEAN),
        int: (2 * RANK, SIZE - 1),
        Decimal: (Decimal(RANK), Decimal(MEAN)),
        torch.Tensor: (torch.tensor(float(RANK)), torch.tensor(MEAN)),
        np.ndarray: (np.array(float(RANK)), np.array(MEAN)),
        bool: (bool(RANK), bool(RANK)),
        str: ("loss", "loss"),
        dict: ({"loss": float(RANK), "best": None}, {"loss": MEAN, "best": None}),
        Scores: (Scores(float(RANK), 3), Scores(MEAN, 3)),
    }
    accelerator, model, optimizer, scheduler = prepared(WithScore)
    with accelerator:
        for kind, (value, expected) in values.items():
            train(accelerator, model, optimizer)
            scheduler.step(value)
            got, _ = scheduler.seen[-1]
            assert type(got) is kind, (kind, got)
            assert got == expected, (kind, got)


@case
def name_of_the_parameter_decides_what_a_metric_is() -> None:
    calls = (
        (WithScore, (float(RANK), RANK), {}, (MEAN, RANK)),
        (WithScore, (), {"epoch": RANK, "val_score": float(RANK)}, (MEAN, RANK)),
        (WithEpochFirst, (RANK,), {}, (None, RANK)),
        (WithEpochFirst, (RANK, float(RANK)), {}, (MEAN, RANK)),
        (WithEpochFirst, (), {"metrics": float(RANK), "epoch": RANK}, (MEAN, RANK)),
        (Open, (float(RANK),), {"epoch": RANK}, (MEAN, RANK)),
    )
    for kind, args, kwargs, expected in calls:
        accelerator, model, optimizer, scheduler = prepared(kind)
        with accelerator:
            train(accelerator, model, optimizer)
            scheduler.step(*args, **kwargs)
            assert scheduler.seen == [expected], (kind, args, kwargs, scheduler.seen)


@case
def epoch_is_not_a_metric() -> None:
    for make in (
        lambda sgd: CosineAnnealingWarmRestarts(sgd, 4),
        lambda sgd: LambdaLR(sgd, lambda epoch: 0.5**epoch),
    ):
        accelerator, model, optimizer, scheduler = prepared(make)
        with accelerator:
            train(accelerator, model, optimizer)
            if RANK == 0:  # so no other rank takes part
                scheduler.step(2)
                assert scheduler.last_epoch == 2


@case
def settings_choose_the_metric() -> None:
    expected = {"mean": MEAN, "rank_0": 0.0, "local": float(RANK)}
    for setting, value in expected.items():
        accelerator, model, optimizer, scheduler = prepared(WithScore, scheduler_metric=setting)
        told = io.StringIO()
        with accelerator, contextlib.redirect_stderr(told):
            for _ in range(2):
                train(accelerator, model, optimizer)
                scheduler.step(float(RANK))
            assert scheduler.seen == 2 * [(value, None)], (setting, scheduler.seen)
        lines = [line for line in told.getvalue().splitlines() if "WithScore moves" in line]
        assert len(lines) == (RANK == 0), lines
        for line in lines:
            assert "moves one step" in line, line
            assert f"scheduler_metric={setting!r}" in line, line
            assert "for each process" not in line, line


@case
def metric_inside_an_accumulation_cycle_is_not_used() -> None:
    accelerator, model, optimizer, scheduler = prepared(WithScore, gradient_accumulation_steps=2)
    with accelerator:
        for step in range(4):
            with accelerator.accumulate(model):
                train(accelerator, model, optimizer)
                scheduler.step(float(RANK + step))
        assert scheduler.seen == [(MEAN + 1, None), (MEAN + 3, None)], scheduler.seen


@case
def uneven_inputs_are_refused() -> None:
    accelerator, model, optimizer, scheduler = prepared(WithScore)
    with accelerator:
        train(accelerator, model, optimizer)
        refusal = pytest.raises(ConfigurationError, match=r"join_uneven_inputs.*scheduler_metric")
        with accelerator.join_uneven_inputs([model]), refusal:
            scheduler.step(1.0)
        scheduler.step(1.0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_cases()
