"""Cases for DeepSpeed: models that are prepared without an optimizer, on one rank and on two."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from common import KEPT, speed, whole
from small_model import Tower, close, data, mine
from torch import nn
from torch.nn.functional import mse_loss
from worker import RANK, case, run_cases, scratch

from accelerate_core.errors import CheckpointError

SGD = torch.optim.SGD
#: Without the threshold, stage 3 would keep these small parameters whole.
STAGE_3 = {"stage": 3, "stage3_param_persistence_threshold": 0}
OFFLOAD = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
CONFIGS = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "stage 3, nothing kept": STAGE_3,
    "stage 3, offload": {**STAGE_3, **OFFLOAD},
}


class Judge(Tower):
    """A model with a buffer, such as a reward model."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.register_buffer("offset", torch.full((8,), float(seed)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.offset


def prepared(zero, seed=0, **options):
    config = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    accelerator = speed(config, **options)
    student = Tower(seed)
    student, optimizer = accelerator.prepare(student, SGD(student.parameters(), 0.5))
    judge = accelerator.prepare(Judge(seed + 1).requires_grad_(False))
    return accelerator, student, optimizer, judge


def train(accelerator, student, optimizer, judge, count=2):
    x, y = data()
    for _ in range(count * accelerator.gradient_accumulation_steps):
        with accelerator.accumulate(student):
            accelerator.backward(mse_loss(judge(student(mine(x))), mine(y)))
            optimizer.step()
            optimizer.zero_grad()


@case
def gradients_flow_through_a_frozen_model() -> None:
    x, y = data()
    student, judge = Tower(0), Judge(1).requires_grad_(False)
    optimizer = SGD(student.parameters(), 0.5)
    for _ in range(2):
        mse_loss(judge(student(x)), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, zero in CONFIGS.items():
        made = prepared(zero, steps=2)
        train(*made)
        close(whole(made[0], made[1]), student.state_dict())
        close(whole(made[0], made[3]), judge.state_dict(), 0)
        assert type(made[0].unwrap_model(made[3])) is Judge, name


@case
def a_frozen_model_is_saved_and_loaded() -> None:
    for index, zero in enumerate(CONFIGS.values()):
        made = prepared(zero)
        train(*made)
        path = scratch(f"frozen_{index}") / "checkpoint"
        made[0].save_state(path)
        train(*made)
        expected = whole(made[0], made[1])
        made[0].save_model(made[3], str(path.parent / "weights"))
        again = prepared(zero, seed=5)
        again[0].load_state(path)
        close(whole(again[0], again[3]), Judge(1).state_dict(), 0)
        # Each rank has its own buffers.
        offset = again[0].unwrap_model(again[3]).offset
        torch.testing.assert_close(offset, Judge(1).offset)
        train(*again)
        close(whole(again[0], again[1]), expected, 0)


@case
def a_full_disk_fails_the_save_on_all_ranks() -> None:
    accelerator, *_ = prepared({"stage": 3})
    save, failing = torch.save, RANK == 0

    def full(state, path, *args, **kwargs):
        if failing and str(path).endswith("model_1.pt"):
            raise OSError("No space left on device")
        save(state, path, *args, **kwargs)

    torch.save = full
    try:
        with pytest.raises(CheckpointError, match="No space left on device"):
            accelerator.save_state(scratch("full") / "checkpoint")
    finally:
        torch.save = save


@case
def a_model_for_evaluation_gets_no_optimizer_from_the_config() -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 0.1}, "legacy_fusion": False}
    optimizer["params"]["torch_adam"] = True
    for stage in (2, 3):
        accelerator = speed({"zero_optimization": {"stage": stage}, "optimizer": optimizer})
        model = accelerator.prepare_model(Tower(), evaluation_mode=True)
        assert getattr(model, "basic_optimizer", None) is None
        with torch.no_grad():
            torch.testing.assert_close(model(data()[0]), Tower()(data()[0]))


@case
def a_model_that_trains_without_an_optimizer_warns() -> None:
    for stage in range(4):
        accelerator = speed(zero_stage=stage)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accelerator.prepare(Tower())
        told = [str(one.message) for one in caught if "without an optimizer" in str(one.message)]
        assert len(told) == (RANK == 0), (stage, told)


@case
def a_model_without_parameters_has_no_engine() -> None:
    for stage in range(4):
        accelerator = speed(zero_stage=stage)
        for model in (nn.Tanh(), nn.BatchNorm1d(8, affine=False)):
            assert accelerator.prepare(model) is model
        path = scratch(f"without_{stage}") / "checkpoint"
        model.running_mean.fill_(3.0)
        accelerator.save_state(path)
        model.running_mean.zero_()
        accelerator.load_state(path)
        assert model.running_mean.tolist() == [3.0] * 8


@case
def all_models_are_freed() -> None:
    for name, zero in CONFIGS.items():
        accelerator, student, optimizer, judge = prepared(zero)
        train(accelerator, student, optimizer, judge, count=4)  # stage 3 has recorded its order
        seen = [weakref.ref(accelerator.unwrap_model(model)) for model in (student, judge)]
        accelerator.free_memory()
        del accelerator, student, optimizer, judge
        gc.collect()
        assert [one() for one in seen] == [None, None], name


@case
def other_engines_train_on_after_one_is_freed() -> None:
    kept, freed = prepared(STAGE_3), prepared(STAGE_3)
    alone = prepared(STAGE_3)
    train(*alone, count=6)
    train(*kept, count=3)
    train(*freed, count=3)
    freed[0].free_memory()
    train(*kept, count=3)
    close(whole(kept[0], kept[1]), whole(alone[0], alone[1]), 0)


if __name__ == "__main__":
    run_cases()
    KEPT.end_training()
