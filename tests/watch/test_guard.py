"""`accelerator.guard` on one process and on two ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support import case_names, check_case, run_workers

from accelerate_core import Accelerator
from accelerate_core.errors import ConfigurationError
from accelerate_watch import GuardError, GuardKwargs

WORKER = Path(__file__).with_name("guard_worker.py")


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def run(request):
    return run_workers(WORKER, 2, [request.param], timeout=150)


@pytest.mark.dist
@pytest.mark.parametrize("case", case_names(WORKER))
def test_case(run, case):
    check_case(run, case)


def guard(**settings):
    return Accelerator(cpu=True, kwargs_handlers=[GuardKwargs(**settings)]).guard


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_loss_that_is_not_finite_is_skipped_on_one_process(value):
    made = guard()
    assert made(torch.tensor(1.0))
    assert not made(torch.tensor(value))
    assert made(torch.tensor(1.0), 0.5)
    assert made.events == [f"the loss is {value} in step 2"]


def test_stop_raises_at_the_first_bad_step():
    made = guard(non_finite="stop")
    with pytest.raises(GuardError, match="the gradient norm is inf in step 1"):
        made(norm=torch.tensor(math.inf))


def test_slowly_changing_values_are_not_spikes():
    made = guard(spikes="stop", window=20)
    for step in range(60):
        assert made(torch.tensor(2.0 - step / 100 + 0.05 * (step % 3)))
    with pytest.raises(GuardError, match=r"the loss is 9, with a median of 1\.5"):
        made(torch.tensor(9.0))


@pytest.mark.parametrize("bad", [0, 1])
def test_a_cycle_is_bad_if_one_of_its_losses_is(bad):
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[GuardKwargs()]
    )
    data = torch.ones(12, 1)
    data[4 + 2 * bad] = math.nan
    loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=2))
    answers = []
    for batch in loader:
        with accelerator.accumulate():
            answers.append(accelerator.guard(batch.sum()))
    assert answers == [True, True, True, False, True, True]
    where = "epoch 0, batches 2 to 3, samples 4 to 7 of the epoch's order"
    assert accelerator.guard.events == [f"the loss is nan in step 2 ({where})"]


def test_nothing_is_read_inside_an_accumulation_cycle():
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[GuardKwargs()]
    )
    answers = []
    for _ in range(2):
        with accelerator.accumulate():
            answers.append(accelerator.guard(torch.tensor(math.nan)))
    assert answers == [True, False]


def test_guard_without_values_is_an_error():
    with pytest.raises(ConfigurationError, match="needs a loss, a norm, or both"):
        guard()()


def test_accelerator_has_no_guard_unless_it_is_requested():
    with pytest.raises(AttributeError, match="guard"):
        _ = Accelerator(cpu=True).guard
