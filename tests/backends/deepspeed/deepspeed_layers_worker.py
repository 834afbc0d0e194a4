"""Cases for DeepSpeed's stage 3: layers that only some ranks use."""

from __future__ import annotations

import pytest
import torch
from common import KEPT, speed, whole
from small_model import close
from torch import nn
from worker import RANK, SIZE, case, run_cases

from accelerate_core.errors import DistributedOperationException

SGD = torch.optim.SGD
#: Without the threshold, stage 3 would keep these small parameters whole.
STAGE_3 = {"stage": 3, "stage3_param_persistence_threshold": 0}


class Choice(nn.Module):
    """Layers of different sizes, of which a forward uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        middle = (4, 4, 32)
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, width), nn.Linear(width, 6)) for width in middle
        )

    def forward(self, x: torch.Tensor, *which: int) -> torch.Tensor:
        for index in which:
            x = torch.tanh(self.parts[index](x))
        return x


class Model(nn.Module):
    """A choice between two other layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.choice, self.last = nn.Linear(6, 6), Choice(), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, *which: int) -> torch.Tensor:
        return self.last(self.choice(self.first(x), *which))


def prepared(zero=STAGE_3, **options):
    accelerator = speed({"zero_optimization": zero}, **options)
    model = Model()
    return (accelerator, *accelerator.prepare(model, SGD(model.parameters(), 0.1)))


def batch(rank=RANK):
    return torch.arange(12.0).reshape(2, 6) / 10 + rank


def step(accelerator, model, optimizer, *which):
    accelerator.backward(model(batch(), *which).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def plain_step(model, optimizer, *choices):
    """Take the step that ranks with these choices take together."""
    for rank, which in enumerate(choices):
        loss = model(batch(rank), *which).square().mean() / SIZE
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@case
def different_layers_are_refused_before_their_parameters_are_gathered() -> None:
    for zero in ({"stage": 3}, STAGE_3):
        for choices, names in (
            (((0,), (1,)), ("rank 0 uses choice.parts.0 in", "rank 1 uses choice.parts.1 in")),
            (((2,), (0,)), ("rank 0 uses choice.parts.2 in", "rank 1 uses choice.parts.0 in")),
            (((0,), ()), ("rank 0 uses choice.parts.0 in", "rank 1 uses last in")),
        ):
            made = prepared(zero)
            with pytest.raises(DistributedOperationException, match="layers of Model") as caught:
                step(*made, *choices[RANK])
            for part in (*names, "transformer_moe_cls_names"):
                assert part in str(caught.value), (part, caught.value)


@case
def losses_that_need_different_layers_are_refused() -> None:
    accelerator, model, _ = prepared()
    outputs = [model(batch(), which) for which in (0, 1)]
    with pytest.raises(DistributedOperationException, match=r"choice\.parts\.1\S* in the backward"):
        accelerator.backward(outputs[RANK].mean())


@case
def layers_of_a_frozen_model_are_compared_too() -> None:
    accelerator = speed({"zero_optimization": STAGE_3})
    model = accelerator.prepare(Model().requires_grad_(False))
    with pytest.raises(DistributedOperationException, match=r"rank 1 uses choice\.parts\.1"):
        model(batch(), RANK)


@case
def all_ranks_may_change_layers_together() -> None:
    plain = Model()
    optimizer = SGD(plain.parameters(), 0.1)
    made = prepared()
    for which in (0, 0, 0, 1, 1, 1, 2, 0, 1, 2, 2, 2, 1, 0, 2):
        step(*made, which)
        with torch.no_grad():
            made[1](batch(), which)
        plain_step(plain, optimizer, *((which,),) * SIZE)
        # DeepSpeed gives zeros to layers that a step doesn't use. SGD then doesn't change them.
    close(whole(made[0], made[1]), plain.state_dict(), 1e-5)


@case
def steps_that_repeat_the_order_run_without_the_check() -> None:
    _, model, _ = made = prepared()
    coordinator = model.optimizer.parameter_offload.get_param_coordinator()
    for _ in range(3):
        step(*made, 0)
    assert "fetch_sub_module" not in vars(coordinator)
    step(*made, 1)
    assert "fetch_sub_module" in vars(coordinator)


@case
def ranks_that_leave_the_recorded_order_differently_fail() -> None:
    made = prepared()
    for _ in range(4):
        step(*made, 0)
    with pytest.raises(DistributedOperationException) as caught:
        step(*made, 1 + RANK)
    for part in ("rank 0 uses choice.parts.1 in", "rank 1 uses choice.parts.2 in"):
        assert part in str(caught.value), (part, caught.value)


@case
def a_rank_that_leaves_the_recorded_order_alone_names_the_layer() -> None:
    _, model, _ = made = prepared({"stage": 3})
    for _ in range(4):
        step(*made, 0)
    if RANK == 1:
        coordinator = model.optimizer.parameter_offload.get_param_coordinator()
        order = vars(coordinator)["_invalidate_trace"].__self__
        order._timeout, order._patience = 0.3, 0.1
        with (
            pytest.raises(DistributedOperationException, match=r"choice\.parts\.1.*earlier steps"),
            pytest.warns(UserWarning, match="waits for the other ranks"),
        ):
            model(batch(), 1)
    KEPT.wait_for_everyone()


@case
def ranks_may_use_different_parts_of_a_block_that_is_gathered_as_a_whole() -> None:
    plain = Model()
    optimizer = SGD(plain.parameters(), 0.1)
    made = prepared(transformer_moe_cls_names="Choice")
    for _ in range(4):
        step(*made, RANK)
        plain_step(plain, optimizer, *((rank,) for rank in range(SIZE)))
    close(whole(made[0], made[1]), plain.state_dict(), 1e-5)


if __name__ == "__main__":
    run_cases()
    KEPT.end_training()
