"""Mistakes that silently change the training are refused, or warned about once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import run_workers
from torch.utils.data import DataLoader

from accelerate_core import Accelerator

STEPS = 6


def parts() -> tuple[Any, ...]:
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, DataLoader(torch.randn(STEPS, 2), 1)


def warnings_of(script: Callable[[], None]) -> list[str]:
    """Return the texts of all warnings, including repeated ones."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        script()
    assert all(one.filename == __file__ for one in caught), caught
    return [str(one.message) for one in caught]


def accumulating(step_prepared: bool, prepare_optimizer: bool = True, steps: int = 2) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model, inner, loader = parts()
    optimizer = accelerator.prepare(inner) if prepare_optimizer else inner
    model, loader = accelerator.prepare(model, loader)
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            stepped = optimizer if step_prepared else inner
            stepped.step()
            stepped.zero_grad()


def test_unprepared_optimizer_inside_accumulate_is_warned_about_once() -> None:
    (text,) = warnings_of(lambda: accumulating(step_prepared=False, prepare_optimizer=False))
    assert text.startswith(
        "accumulate(): the SGD, which was not prepared, steps in every micro-batch"
    )
    (text,) = warnings_of(lambda: accumulating(step_prepared=False))
    assert "the SGD that was passed to prepare(), not the one that it returned" in text
    assert warnings_of(lambda: accumulating(step_prepared=True)) == []
    assert warnings_of(lambda: accumulating(False, prepare_optimizer=False, steps=1)) == []


def plain_loop(
    *, steps: int, every: int = 1, enter: bool = False, inside: Callable[..., Any] | None = None
) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model, optimizer, loader = accelerator.prepare(*parts())
    for index, x in enumerate(loader, 1):
        if enter:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()
            continue
        accelerator.backward((inside or model)(x).sum())
        if index % every == 0:
            optimizer.step()
            optimizer.zero_grad()


def test_accumulation_without_accumulate_is_warned_about_once() -> None:
    (text,) = warnings_of(lambda: plain_loop(steps=3))
    assert text.startswith("gradient_accumulation_steps=3 divides every loss by 3")
    assert "accelerator.accumulate(model)" in text
    assert warnings_of(lambda: plain_loop(steps=3, enter=True)) == []
    assert warnings_of(lambda: plain_loop(steps=1)) == []
    # Manual accumulation calls step() after several backwards.
    assert warnings_of(lambda: plain_loop(steps=3, every=3)) == []


def test_loss_of_another_model_is_warned_about_once() -> None:
    other = torch.nn.Linear(2, 1)
    (text,) = warnings_of(lambda: plain_loop(steps=1, inside=other))
    assert text.startswith(
        "backward() got a loss that does not depend on a prepared model (Sequential)"
    )
    assert "such as one of shape [1" in text


@pytest.mark.parametrize(
    "options", [{}, {"mixed_precision": "bf16"}, {"dynamo_backend": "aot_eager"}]
)
def test_loss_of_a_prepared_model_is_accepted_however_it_was_computed(
    options: dict[str, Any],
) -> None:
    def script() -> None:
        accelerator = Accelerator(cpu=True, **options)
        model, optimizer, loader = accelerator.prepare(*parts())
        frozen = torch.nn.Linear(2, 1)
        for number, x in enumerate(loader):
            if number % 2:
                loss = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum()
            else:
                loss = (model(x) - frozen(x)).square().sum()
            accelerator.backward(loss)
            optimizer.step()

    assert [text for text in warnings_of(script) if "backward()" in text] == []


def test_discarding_the_results_of_prepare_is_warned_about() -> None:
    def discarded() -> None:
        accelerator = Accelerator(cpu=True)
        model, optimizer, loader = parts()
        accelerator.prepare(model, optimizer, loader)

    (text,) = warnings_of(discarded)
    assert text.startswith("The results of prepare() are ignored")
    assert "keeps using the unprepared SGD, DataLoader" in text

    def one_by_one() -> None:
        accelerator = Accelerator(cpu=True)
        _, optimizer, loader = parts()
        accelerator.prepare_data_loader(loader)
        accelerator.prepare_optimizer(optimizer)

    assert len(warnings_of(one_by_one)) == 2

    def used() -> None:
        accelerator = Accelerator(cpu=True)
        model, optimizer, loader = parts()
        accelerator.prepare(model)  # replaced in place, so the result is not lost
        assert accelerator.prepare(optimizer) is not optimizer
        held = [accelerator.prepare(loader)]
        _ = accelerator.prepare(*held)
        accelerator.prepare(held[0])

    assert warnings_of(used) == []


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [("model", "'model'"), (3, "3"), (2.5, "2.5"), (torch.nn.Linear, "the class Linear")],
)
def test_prepare_warns_about_what_cannot_be_prepared(wrong: Any, shown: str) -> None:
    accelerator = Accelerator(cpu=True)

    def script() -> None:
        assert accelerator.prepare(torch.nn.Linear(1, 1), wrong)[1] is wrong

    (text,) = warnings_of(script)
    assert f"argument 2 is {shown}, which is returned unchanged" in text


def test_prepare_warns_about_a_list_and_returns_other_objects_unchanged() -> None:
    accelerator = Accelerator(cpu=True)
    models = [torch.nn.Linear(1, 1)]

    def script() -> None:
        assert accelerator.prepare(models) is models

    (text,) = warnings_of(script)
    assert "Argument 1 of prepare() is a list" in text
    others = (None, {"lr": 0.1}, [1, 2], torch.ones(1))
    assert warnings_of(lambda: None if accelerator.prepare(*others) == others else 1 / 0) == []


def test_gathering_a_string_on_one_process_is_warned_about() -> None:
    accelerator = Accelerator(cpu=True)

    def script() -> None:
        assert accelerator.gather("text") == "text"

    (text,) = warnings_of(script)
    assert text.startswith("gather takes tensors")
    assert "not a str" in text
    assert "several raise this error" in text
    assert warnings_of(lambda: accelerator.gather({"a": [torch.ones(1)]}) and None) == []


@pytest.mark.dist
@pytest.mark.parametrize("how", ["inner", "wrapper", "copied"])
def test_calling_the_unwrapped_model_is_warned_about(how: str) -> None:
    run = run_workers(Path(__file__).with_name("misuse_worker.py"), 2, [how]).checked()
    for texts in run.results:
        if how == "inner":
            (text,) = texts
            assert "the DistributedDataParallel itself was not called" in text
        else:
            assert texts == []
