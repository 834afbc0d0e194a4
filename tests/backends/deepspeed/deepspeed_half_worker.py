"""Cases for DeepSpeed's own half precision: dtypes, the loss scale and skipped steps."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from common import KEPT, speed, whole
from parity_worker import train
from small_model import Tower, close, data, mine
from torch import nn
from torch.nn.functional import mse_loss
from worker import RANK, SIZE, case, run_cases, scratch

from accelerate_core import GradScalerKwargs
from accelerate_core.errors import ConfigurationError
from accelerate_core.utils import AutocastKwargs, TorchDynamoPlugin
from accelerate_deepspeed import DeepSpeedPlugin
from accelerate_deepspeed.zero import GatheredParameters

SGD, ADAM = torch.optim.SGD, torch.optim.AdamW
STAGES = (0, 1, 2, 3)
#: Configs that offload the optimizer's state and, with stage 3, parameters.
OFFLOADED = [
    {
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}, **more},
        "zero_force_ds_cpu_optimizer": False,
    }
    for stage, more in ((1, {}), (2, {}), (3, {"offload_param": {"device": "cpu"}}))
]
EVERYWHERE: list[dict[str, Any]] = [
    *({"zero_stage": stage} for stage in STAGES),
    *({"config": config} for config in OFFLOADED),
]
X, Y = data()


def half(scale: float = 256.0, scaling: dict[str, Any] | None = None, **options: Any) -> Any:
    handlers = [GradScalerKwargs(init_scale=scale, **scaling or {})]
    return speed(mixed_precision="fp16", kwargs_handlers=handlers, **options)


def trained(make=SGD, seed=0, lr=0.5, scale=256.0, **options):
    accelerator = half(scale, **options)
    model = Tower(seed)
    return (accelerator, *accelerator.prepare(model, make(model.parameters(), lr=lr)))


def loss_of(model: Any) -> torch.Tensor:
    return mse_loss(model(mine(X)), mine(Y))


def near(accelerator: Any, model: Any, plain: nn.Module, atol: float = 2e-3) -> None:
    weights = {name: value.float() for name, value in whole(accelerator, model).items()}
    close(weights, plain.state_dict(), atol)


# --- dtypes ---------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "one other")


class Nested(nn.Module):
    """Takes and returns nested structures, and records the dtypes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(8, 8), nn.Linear(8, 8)

    def forward(self, pair: Pair, *, batch: dict[str, Any]) -> dict[str, Any]:
        floats = [pair.one, pair.other, batch["rows"][0]]
        self.seen = [x.dtype for x in floats], batch["ids"].dtype, batch["mask"].dtype, type(pair)
        out = self.linear(sum(floats)) + self.table(batch["ids"])
        out = out * batch["mask"].unsqueeze(-1)
        return {"pair": Pair(out, [out * 2]), "ids": batch["ids"], "name": batch["name"]}


def nested_batch() -> tuple[Pair, dict[str, Any]]:
    x = torch.ones(3, 8)
    ids = torch.tensor([1, 2, 3])
    return Pair(x, x.double()), {"rows": [x.bfloat16()], "ids": ids, "mask": ids > 1, "name": "a"}


@case
def nested_inputs_are_cast_and_outputs_are_upcast() -> None:
    for options in (
        *({"zero_stage": stage, "mixed_precision": "fp16"} for stage in STAGES),
        *({"config": {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}}
          for stage in (0, 2)),
    ):  # fmt: skip
        accelerator = speed(**options)
        dtype = torch.float16 if accelerator.mixed_precision == "fp16" else torch.bfloat16
        model = Nested()
        model, optimizer = accelerator.prepare(model, SGD(model.parameters(), 0.1))
        pair, batch = nested_batch()
        inner = accelerator.unwrap_model(model)
        for called in (model, inner) if options.get("zero_stage", 2) else (model,):
            out = called(pair, batch=batch)
            assert inner.seen == ([dtype] * 3, torch.int64, torch.bool, Pair)
            assert type(out["pair"]) is Pair
            assert {out["pair"].one.dtype, out["pair"].other[0].dtype} == {torch.float32}
            assert (out["ids"].dtype, out["name"]) == (torch.int64, "a")
            accelerator.backward(out["pair"].one.sum())
            optimizer.step()
            optimizer.zero_grad()
        assert pair.one.dtype is torch.float32  # the user's own object is unchanged


@case
def casting_of_inputs_and_outputs_can_be_disabled() -> None:
    handlers = [AutocastKwargs(upcast_outputs=False)]
    for options in ({"upcast_outputs": False}, {"kwargs_handlers": handlers}):
        accelerator = speed(zero_stage=2, mixed_precision="fp16", **options)
        model = Tower()
        model, _ = accelerator.prepare(model, SGD(model.parameters(), 0.1))
        assert model(mine(X)).dtype is torch.float16
    section = {"enabled": True, "auto_cast": False}
    accelerator = speed({"zero_optimization": {"stage": 2}, "fp16": section})
    model = Tower()
    model, _ = accelerator.prepare(model, SGD(model.parameters(), 0.1))
    with pytest.raises(RuntimeError, match="same dtype"):
        model(mine(X))
    assert model(mine(X).half()).dtype is torch.float32


@case
def model_that_does_not_train_computes_in_fp16() -> None:
    for stage in (2, 3):  # with stage 3, it has an engine
        accelerator = speed(zero_stage=stage, mixed_precision="fp16")
        model = accelerator.prepare_model(Tower().requires_grad_(False), evaluation_mode=True)
        seen: list[torch.dtype] = []
        accelerator.unwrap_model(model).layers[1].register_forward_hook(
            lambda module, args, out, seen=seen: seen.append(out.dtype)
        )
        with torch.no_grad():
            out = model(mine(X))
        assert (out.dtype, seen) == (torch.float32, [torch.float16])
        torch.testing.assert_close(out, Tower()(mine(X)), rtol=0, atol=5e-3)


@case
def models_created_with_zero3_init_flag_train() -> None:
    accelerator = half(zero_stage=3, zero3_init_flag=True)
    with accelerator.init_model_context():
        model = Tower()
    with GatheredParameters(model.parameters(), modifier_rank=0):
        if RANK == 0:
            model.load_state_dict(Tower().state_dict())
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), 0.5))
    plain = Tower()
    sgd = SGD(plain.parameters(), 0.5)
    for _ in range(2):
        accelerator.backward(loss_of(model))
        optimizer.step()
        mse_loss(plain(X), Y).backward()
        sgd.step()
        sgd.zero_grad()
    near(accelerator, model, plain)


@case
def fp16_is_rejected_if_deepspeed_does_not_support_it() -> None:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CPU_Accelerator, "is_fp16_supported", lambda self: False)
        with pytest.raises(
            ConfigurationError, match=r"not supported by DeepSpeed on this cpu.*bf16"
        ):
            speed(zero_stage=2, mixed_precision="fp16")


# --- numbers --------------------------------------------------------------------------------------


@case
def losses_and_norms_are_close_to_ddp() -> None:
    expected = train({}, backend="ddp", mixed_precision="fp16")
    for where in EVERYWHERE:
        plugin = DeepSpeedPlugin(where.get("config"), zero_stage=where.get("zero_stage"))
        found = train({}, deepspeed_plugin=plugin, mixed_precision="fp16")
        worst = max(abs(a - b) for a, b in zip(found["losses"], expected["losses"], strict=True))
        assert worst <= 1e-2, (where, worst, found["losses"], expected["losses"])
        apart = [abs(a - b) / b for a, b in zip(found["norms"], expected["norms"], strict=True)]
        assert max(apart) <= 3e-2, (where, apart)


@case
def half_precision_with_stage_0_starts_without_deepspeeds_extra_step() -> None:
    def make(parameters, lr):  # an extra step would change the weights noticeably
        return ADAM(parameters, lr=lr, weight_decay=0.5, betas=(0.5, 0.5))

    for precision in ("fp16", "bf16"):
        ends = []
        for stage in (0, 1):
            own = {"bf16": {"enabled": True}} if precision == "bf16" else {}
            accelerator = speed(
                {"zero_optimization": {"stage": stage}} | own, mixed_precision=precision
            )
            model = Tower()
            model, optimizer = accelerator.prepare(model, make(model.parameters(), 0.1))
            for _ in range(2):
                accelerator.backward(loss_of(model))
                optimizer.step()
            ends.append({name: p.float() for name, p in whole(accelerator, model).items()})
        close(*ends, 5e-3 if precision == "fp16" else 2e-2)


@case
def norms_and_clipping_use_unscaled_gradients() -> None:
    for scale in (256.0, 65536.0):
        for norm_type in (2.0, float("inf")):
            for where in EVERYWHERE:
                accelerator, model, optimizer = trained(scale=scale, **where)
                plain = Tower()
                sgd = SGD(plain.parameters(), 0.5)
                for limit in (0.02, 10.0):
                    mse_loss(plain(X), Y).backward()
                    norm = nn.utils.clip_grad_norm_(plain.parameters(), limit, norm_type)
                    sgd.step()
                    sgd.zero_grad()
                    accelerator.backward(loss_of(model))
                    got = accelerator.clip_grad_norm_(model.parameters(), limit, norm_type)
                    assert abs(float(got) - float(norm)) < 2e-2 * float(norm), (where, got, norm)
                    optimizer.step()
                    assert not accelerator.optimizer_step_was_skipped, where
                near(accelerator, model, plain)


@case
def clip_grad_value_uses_unscaled_gradients() -> None:
    plain = Tower()
    sgd = SGD(plain.parameters(), 0.5)
    mse_loss(plain(X), Y).backward()
    nn.utils.clip_grad_value_(plain.parameters(), 1e-3)
    sgd.step()
    for where in EVERYWHERE:
        accelerator, model, optimizer = trained(**where)
        accelerator.backward(loss_of(model))
        accelerator.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        near(accelerator, model, plain, 5e-4)


@case
def accumulation_and_num_items_work_with_a_loss_scale() -> None:
    for items in (False, True):
        plain = Tower()
        sgd = SGD(plain.parameters(), 0.5)
        for _ in range(2):
            mse_loss(plain(X), Y).backward()
            sgd.step()
            sgd.zero_grad()
        for where in EVERYWHERE:
            accelerator, model, optimizer = trained(steps=2, **where)
            for _ in range(2):
                for part in (0, 1):
                    x, y = mine(X)[part::2], mine(Y)[part::2]
                    count = y.numel() if items else None
                    with accelerator.accumulate(model, num_items=count):
                        how = "sum" if items else "mean"
                        accelerator.backward(mse_loss(model(x), y, reduction=how))
                        if accelerator.sync_gradients or "config" not in where:
                            accelerator.clip_grad_norm_(model.parameters(), 1e3)
                        optimizer.step()
                        optimizer.zero_grad()
            near(accelerator, model, plain)


@case
def compiled_engine_trains_in_fp16() -> None:
    plain = Tower()
    sgd = SGD(plain.parameters(), 0.5)
    mse_loss(plain(X), Y).backward()
    sgd.step()
    for stage in STAGES:
        # Casts are part of the graph, but the hooks of stage 3 are not.
        dynamo = TorchDynamoPlugin(backend="eager", fullgraph=stage < 3)
        accelerator, model, optimizer = trained(zero_stage=stage, dynamo_plugin=dynamo)
        assert model.is_compiled
        accelerator.backward(loss_of(model))
        optimizer.step()
        near(accelerator, model, plain)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


@case
def tensor_parallel_ranks_skip_a_step_together() -> None:
    specs = [
        {"patterns": [f".*{name}.weight$"], "partition_type": kind}
        for name, kind in (("up", "column"), ("down", "row"))
    ]
    split = {"use_default_specs": False, "layer_specs": specs}
    config = {
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": 2, "partition_config": split},
    }
    plain = Halves()
    sgd = SGD(plain.parameters(), 0.1)
    accelerator = half(config=config)
    model = Halves()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), 0.1))
    for _ in range(3):
        expected = mse_loss(plain(X), Y)
        expected.backward()
        sgd.step()
        sgd.zero_grad()
        loss = mse_loss(model(X), Y)
        assert abs(float(loss) - float(expected)) < 1e-3
        accelerator.backward(loss)
        optimizer.step()
    accelerator.backward(mse_loss(model(X), Y) * (float("inf") if RANK else 1.0))
    optimizer.step()
    assert (accelerator.optimizer_step_was_skipped, model.optimizer.loss_scale) == (True, 128)


# --- the loss scale -------------------------------------------------------------------------------


def overflow(accelerator: Any, model: Any) -> None:
    """Cause an overflow on the last rank only."""
    factor = float("inf") if RANK == SIZE - 1 else 1.0
    accelerator.backward(loss_of(model) * factor)


@case
def overflow_on_one_rank_skips_a_step_on_all_and_halves_the_scale() -> None:
    def nothing(model: Any) -> None: ...

    def norm(model: Any) -> None:
        assert float(accelerator.clip_grad_norm_(model.parameters(), 0.02)) == float("inf")

    def largest(model: Any) -> None:
        accelerator.clip_grad_norm_(model.parameters(), 0.02, float("inf"))

    def value(model: Any) -> None:
        accelerator.clip_grad_value_(model.parameters(), 0.02)

    for where in EVERYWHERE:
        for between in (nothing, norm, largest, value):
            accelerator = half(**where)
            model = Tower()
            optimizer = SGD(model.parameters(), 0.5)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
            found = []
            for planted in (False, True, False):
                before = whole(accelerator, model)
                if planted:
                    overflow(accelerator, model)
                    between(model)
                else:
                    accelerator.backward(loss_of(model))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                after = whole(accelerator, model)
                same = all(torch.equal(after[name], before[name]) for name in after)
                assert accelerator.optimizer_step_was_skipped == planted == same, (where, between)
                found.append((model.optimizer.loss_scale, schedule.get_last_lr()[0]))
            assert found == [(256, 0.25), (128, 0.25), (128, 0.125)], (where, between, found)
            assert optimizer.steps_taken == 2


@case
def overflow_dropped_by_zero_grad_does_not_skip_the_next_step() -> None:
    for where in EVERYWHERE:
        accelerator, model, optimizer = trained(**where)
        overflow(accelerator, model)
        optimizer.zero_grad()
        accelerator.backward(loss_of(model))
        optimizer.step()
        assert not accelerator.optimizer_step_was_skipped, where
        assert model.optimizer.loss_scale == 256


@case
def overflow_inside_a_cycle_skips_its_step() -> None:
    for where in EVERYWHERE:
        accelerator, model, optimizer = trained(steps=2, **where)
        skipped = []
        for planted in (True, False, False, False):
            with accelerator.accumulate(model):
                if planted:
                    overflow(accelerator, model)
                else:
                    accelerator.backward(loss_of(model))
                optimizer.step()
                optimizer.zero_grad()
            skipped.append(accelerator.optimizer_step_was_skipped)
        assert skipped[1::2] == [True, False], (where, skipped)


@case
def loss_scale_follows_its_options() -> None:
    for where in ({"zero_stage": stage} for stage in STAGES):
        accelerator, model, optimizer = trained(scale=8.0, scaling={"growth_interval": 2}, **where)
        assert model.optimizer.loss_scale == 8
        for _ in range(5):
            accelerator.backward(loss_of(model))
            optimizer.step()
        assert model.optimizer.loss_scale == 32, where
    zero = {"zero_optimization": {"stage": 2}}
    for section, options, scales in (
        ({"enabled": True, "loss_scale": 64}, {}, [64, 64, 64, 64]),
        (
            {"enabled": True, "initial_scale_power": 5},
            {},
            [32, 16, 8, 4],
        ),  # hysteresis delays the first
        ({}, {"kwargs_handlers": [GradScalerKwargs(enabled=False)]}, [1, 1, 1, 1]),
    ):
        accelerator = speed(
            zero | ({"fp16": section} if section else {}), mixed_precision="fp16", **options
        )
        model = Tower()
        model, optimizer = accelerator.prepare(model, SGD(model.parameters(), 0.5))
        found = []
        for _ in range(4):
            overflow(accelerator, model)
            optimizer.step()
            assert accelerator.optimizer_step_was_skipped
            found.append(model.optimizer.loss_scale)
        assert found == scales, (section, found)


@case
def run_resumes_bit_for_bit_with_its_loss_scale() -> None:
    for number, where in enumerate(EVERYWHERE):
        accelerator, model, optimizer = trained(ADAM, lr=1e-2, **where)
        ends = []
        for attempt in (0, 1):
            if attempt:
                accelerator, model, optimizer = trained(ADAM, seed=1, lr=1e-2, **where)
                accelerator.load_state(str(scratch("half") / str(number)))
                assert model.optimizer.loss_scale == 128
            else:
                for planted in (False, True):
                    if planted:
                        overflow(accelerator, model)
                    else:
                        accelerator.backward(loss_of(model))
                    optimizer.step()
                    optimizer.zero_grad()
                accelerator.save_state(str(scratch("half") / str(number)))
            for _ in range(2):
                accelerator.backward(loss_of(model))
                optimizer.step()
                optimizer.zero_grad()
            ends.append(whole(accelerator, model))
        close(*ends, 0)


# --- several models -------------------------------------------------------------------------------


@case
def loss_through_several_engines_has_one_scale() -> None:
    for where in ({"zero_stage": stage} for stage in STAGES):
        accelerator = half(**where)
        plain = [Tower(0), Tower(1)]
        plain_optimizers = [SGD(model.parameters(), 0.5) for model in plain]
        models = [Tower(0), Tower(1)]
        optimizers = [SGD(model.parameters(), 0.5) for model in models]
        *models, first, second = accelerator.prepare(*models, *optimizers)
        for planted in (True, False, True, False):
            if planted:  # only the second scale decreases
                overflow(accelerator, models[1])
                second.step()
                assert accelerator.optimizer_step_was_skipped
                assert models[1].optimizer.loss_scale < models[0].optimizer.loss_scale
                second.zero_grad()
                continue
            # The first model already has gradients with its own scale.
            accelerator.backward(mse_loss(models[0](mine(X)), mine(Y)))
            out = models[1](models[0](mine(X)))
            accelerator.backward(mse_loss(out, mine(Y)))
            scales = {model.optimizer.loss_scale for model in models}
            assert len(scales) == 1, scales
            both = [parameter for model in models for parameter in model.parameters()]
            got = accelerator.clip_grad_norm_(both, 0.02)
            mse_loss(plain[0](X), Y).backward()
            mse_loss(plain[1](plain[0](X)), Y).backward()
            norm = nn.utils.clip_grad_norm_([p for one in plain for p in one.parameters()], 0.02)
            assert abs(float(got) - float(norm)) < 2e-2 * float(norm), (where, got, norm)
            for optimizer in (first, second, *plain_optimizers):
                optimizer.step()
                optimizer.zero_grad()
        for model, expected in zip(models, plain, strict=True):
            near(accelerator, model, expected)


@case
def different_static_scales_are_rejected_for_one_loss() -> None:
    plugins = {
        name: DeepSpeedPlugin({"zero_optimization": {"stage": 2},
                               "fp16": {"enabled": True, "loss_scale": scale}})
        for name, scale in (("one", 64), ("other", 128))
    }  # fmt: skip
    from accelerate_core import Accelerator

    accelerator = Accelerator(cpu=True, deepspeed_plugins=plugins, process_group_timeout=60)
    models = []
    for name in plugins:
        accelerator.state.select_deepspeed_plugin(name)
        model = Tower()
        models += [accelerator.prepare(model, SGD(model.parameters(), 0.5))]
    (one, _), (other, _) = models
    with pytest.raises(ConfigurationError, match=r"static scales \[64\.0, 128\.0\]"):
        accelerator.backward(other(one(mine(X))).sum())
    for model, optimizer in models:
        accelerator.backward(loss_of(model))
        optimizer.step()


if __name__ == "__main__":
    run_cases()
    KEPT.end_training()
