"""Guards on two ranks: one decision for all, with DDP and FSDP2."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from worker import PG_TIMEOUT, RANK, SIZE, case, flat, run_cases, same_on_ranks, scratch

from accelerate_core import Accelerator
from accelerate_watch import GuardError, GuardKwargs, flight_recorder

BACKEND = sys.argv[1]
#: In this step, the data of rank 1 is not finite.
BAD = 5


def collectives() -> int:
    """Return how many collectives this rank has entered."""
    last = {one.group: one.number for one in flight_recorder.collectives()}
    return sum(last.values())


class Trained:
    """Trains some steps with a guard, and remembers what it answered."""

    def __init__(
        self,
        settings: GuardKwargs,
        steps: int = 10,
        scale: dict[int, float] | None = None,
        with_loss: bool = False,
        save_at: int | None = None,
    ) -> None:
        accelerator = Accelerator(
            cpu=True,
            backend=BACKEND,
            process_group_timeout=PG_TIMEOUT,
            kwargs_handlers=[settings],
        )
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = [(torch.full((4,), float(i)),) for i in range(steps * 2 * SIZE)]
        loader = torch.utils.data.DataLoader(data, batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        self.accelerator, self.model, self.loader = accelerator, model, loader
        self.guard = accelerator.guard
        self.answers: list[bool] = []
        self.entered: list[int] = []
        self.batches = 0
        self.weights_at_save: torch.Tensor | None = None
        for step, _ in enumerate(loader):
            self.batches += 1
            factor = (scale or {}).get(step, 1.0)
            if math.isnan(factor) and RANK == 0:
                factor = 1.0
            loss = (model(torch.ones(2, 4)) * factor).square().mean()
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
            before = collectives()
            answer = self.guard(loss if with_loss else None, norm)
            self.entered.append(collectives() - before)
            self.answers.append(answer)
            if answer:
                optimizer.step()
            optimizer.zero_grad()
            if step == save_at:
                accelerator.save_state(scratch("saved") / "checkpoint")
                self.weights_at_save = self.weights()

    def weights(self) -> torch.Tensor:
        """Return the whole weights."""
        state = self.accelerator.get_state_dict(self.model)
        self.accelerator.wait_for_everyone()
        return flat(state.values()) if state else torch.zeros(0)


@case
def step_with_nan_on_one_rank_is_skipped_on_all_without_a_collective() -> None:
    run = Trained(GuardKwargs(), scale={BAD: math.nan})
    assert run.answers == [step != BAD for step in range(10)]
    assert same_on_ranks(torch.tensor(run.answers, dtype=torch.float))
    assert set(run.entered) == {0}
    (event,) = run.guard.events
    start = BAD * 2 * SIZE
    assert event == (
        f"the gradient norm is nan in step {BAD + 1} (epoch 0, batch {BAD}, samples {start} to "
        f"{start + 2 * SIZE - 1} of the epoch's order)"
    )
    assert torch.isfinite(run.weights()).all()


@case
def loss_costs_one_collective() -> None:
    run = Trained(GuardKwargs(), scale={BAD: math.nan}, with_loss=True)
    assert run.answers == [step != BAD for step in range(10)]
    assert set(run.entered[1:]) == {1}, run.entered  # the first reduction also compares shapes


@case
def spike_is_skipped_on_all_ranks() -> None:
    run = Trained(GuardKwargs(spikes="skip", window=20), steps=30, scale={25: 30.0})
    assert [step for step, taken in enumerate(run.answers) if not taken] == [25]
    assert "the gradient norm is" in run.guard.events[0]
    assert "with a median of" in run.guard.events[0]


@case
def run_stops_on_all_ranks_after_steps_in_a_row() -> None:
    with pytest.raises(
        GuardError, match=r"the gradient norm is nan in step 6.*bad step 2 in a row"
    ):
        Trained(GuardKwargs(patience=2), scale={4: math.nan, 5: math.nan})


@case
def rollback_restores_the_weights_and_the_data_continues() -> None:
    settings = GuardKwargs(
        patience=2, then="rollback", checkpoint=str(scratch("saved") / "checkpoint")
    )
    scale = {7: math.nan, 8: math.nan}
    run = Trained(settings, steps=9, scale=scale, save_at=3)
    assert run.answers[7:] == [False, False]
    assert torch.equal(run.weights(), run.weights_at_save)
    assert run.batches == 9
    assert run.loader.iteration == 1
    assert len(list(run.loader)) == 9  # the next epoch is complete


run_cases()
