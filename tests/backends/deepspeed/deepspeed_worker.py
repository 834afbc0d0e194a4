"""Cases for DeepSpeed: the loop, optimizers, models, checkpoints and errors."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
from common import KEPT, speed, whole
from small_model import Tower, close, data, mine, reference, steps
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from worker import PG_TIMEOUT, RANK, SIZE, case, run_cases, scratch

from accelerate_compile.recognise import is_compiled_module
from accelerate_core import Accelerator, ParallelismConfig
from accelerate_core.errors import CheckpointError, ConfigurationError, PrepareError
from accelerate_core.utils import GradientAccumulationPlugin, TorchDynamoPlugin, set_seed
from accelerate_deepspeed import DeepSpeedPlugin, DummyOptim, DummyScheduler
from accelerate_deepspeed.checkpoint_files import merge
from accelerate_deepspeed.settings import get_active_deepspeed_plugin
from accelerate_deepspeed.zero import GatheredParameters

ADAM = torch.optim.AdamW


def trained(stage=2, make=ADAM, seed=0, lr=1e-2, **options):
    accelerator = speed(zero_stage=stage, **options)
    model = Tower(seed)
    optimizer = make(model.parameters(), lr=lr)
    return (accelerator, *accelerator.prepare(model, optimizer))


# --- the loop -------------------------------------------------------------------------------------


@case
def gradients_are_not_clipped_by_default() -> None:
    zero = {"zero_optimization": {"stage": 2}}
    for config in (zero, zero | {"gradient_clipping": "auto"}):
        accelerator = speed(config)
        model = Tower()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.5))
        assert model.gradient_clipping() == 0.0  # DeepSpeed's own default is 1.0
        steps(model, optimizer, accelerator)
        close(whole(accelerator, model), reference(Tower(), torch.optim.SGD, lr=0.5))


@case
def gradient_clipping_in_the_config_applies_and_cannot_be_contradicted() -> None:
    config = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1e-2}
    accelerator = speed(config)
    model = Tower()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.5))
    x, y = data()
    plain = Tower()
    sgd = torch.optim.SGD(plain.parameters(), 0.5)
    for _ in range(2):
        mse_loss(plain(x), y).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1e-2)
        sgd.step()
        sgd.zero_grad()
        accelerator.backward(mse_loss(model(mine(x)), mine(y)))
        optimizer.step()
    close(whole(accelerator, model), plain.state_dict())
    accelerator.backward(mse_loss(model(mine(x)), mine(y)))
    with pytest.raises(ConfigurationError, match=r"max_norm=1\.0.*gradient_clipping=0\.01"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    accelerator.clip_grad_norm_(model.parameters(), 1e-2)
    optimizer.zero_grad()


@case
def unsupported_clipping_is_rejected() -> None:
    x, y = data()
    accelerator, model, optimizer = trained(2)
    with pytest.raises(ConfigurationError, match="without a backward"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    accelerator.backward(mse_loss(model(mine(x)), mine(y)))
    with pytest.raises(ConfigurationError, match=r"2 of 6 parameters of Tower"):
        accelerator.clip_grad_norm_(model.module.layers[0].parameters(), 1.0)
    with pytest.raises(ConfigurationError, match="norm_type=1"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0, 1)
    optimizer.zero_grad()


@case
def zero_grad_drops_unused_gradients() -> None:
    x, y = data()
    for stage in (0, 1, 2, 3):
        accelerator, model, optimizer = trained(stage, torch.optim.SGD, lr=0.5)
        accelerator.backward(mse_loss(model(mine(x)), mine(y)) * 1000)
        optimizer.zero_grad()
        steps(model, optimizer, accelerator)
        close(whole(accelerator, model), reference(Tower(), torch.optim.SGD, lr=0.5))


@case
def parameters_that_are_unfrozen_after_prepare_are_refused() -> None:
    """DeepSpeed's optimizer holds copies of the parameters that required gradients."""
    for stage in range(4):
        accelerator = speed({"train_micro_batch_size_per_gpu": 2}, zero_stage=stage)
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        )
        net[0].requires_grad_(False)
        trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(trained, lr=0.1))
        inner, x = accelerator.unwrap_model(model), torch.ones(2, 3) * (RANK + 1)
        for frozen in (False, True, False):
            inner[1].requires_grad_(not frozen)
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
        inner[0].requires_grad_(True)
        with pytest.raises(ConfigurationError, match=r"unfrozen: '0\.weight', '0\.bias'.*prepare"):
            accelerator.backward(model(x).sum())
        accelerator.end_training()


@case
def accumulation_with_uneven_last_batches_matches_ddp() -> None:
    rows = 10 * SIZE + 3  # the last batches are short, and end a cycle of three early
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(rows, 8, generator=generator), torch.randn(rows, 8, generator=generator)
    for sync in (True, False):
        results = {}
        for backend in ("ddp", "deepspeed"):
            set_seed(0)
            options = {"backend": backend}
            if backend == "deepspeed":
                options = {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2)}
            accelerator = Accelerator(
                cpu=True,
                gradient_accumulation_plugin=GradientAccumulationPlugin(
                    num_steps=3, sync_with_dataloader=sync
                ),
                process_group_timeout=PG_TIMEOUT,
                **options,
            )
            model = Tower()
            sgd = torch.optim.SGD(model.parameters(), 0.1)
            loader = DataLoader(TensorDataset(x, y), 2)
            model, sgd, loader = accelerator.prepare(model, sgd, loader)
            count = 0
            for _ in range(2):
                for one, other in loader:
                    with accelerator.accumulate(model):
                        accelerator.backward(mse_loss(model(one), other))
                        sgd.step()
                        sgd.zero_grad()
                        count += accelerator.sync_gradients
            results[backend] = (count, whole(accelerator, model))
        assert results["ddp"][0] == results["deepspeed"][0]
        close(results["ddp"][1], results["deepspeed"][1])


@case
def step_without_a_backward_changes_nothing() -> None:
    accelerator, model, optimizer = trained(2)
    before = whole(accelerator, model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        optimizer.step()
    close(whole(accelerator, model), before, 0)
    accelerator.backward(model(torch.randn(2, 8)).sum())
    with pytest.raises(ConfigurationError, match="closure"):
        optimizer.step(lambda: None)
    optimizer.zero_grad()


@case
def reading_the_norm_inside_a_cycle_changes_nothing() -> None:
    x, y = data()
    plain = Tower()
    sgd = torch.optim.SGD(plain.parameters(), 0.5)
    norms = []
    for _ in range(2):
        for part in (0, 1):
            (mse_loss(plain(x[part::2]), y[part::2]) / 2).backward()
            norms.append(float(nn.utils.get_total_norm([p.grad for p in plain.parameters()])))
        sgd.step()
        sgd.zero_grad()
    for stage in (0, 1, 2, 3):
        accelerator, model, optimizer = trained(stage, torch.optim.SGD, lr=0.5, steps=2)
        found = []
        for _ in range(2):
            for part in (0, 1):
                with accelerator.accumulate(model):
                    loss = mse_loss(model(mine(x[part::2])), mine(y[part::2]))
                    accelerator.backward(loss)
                    found.append(float(accelerator.clip_grad_norm_(model.parameters(), 1e9)))
                    optimizer.step()
                    optimizer.zero_grad()
        assert max(abs(a - b) for a, b in zip(found, norms, strict=True)) < 1e-6, (stage, found)
        close(whole(accelerator, model), plain.state_dict())


@case
def reading_the_norm_inside_a_cycle_is_rejected_with_stage_1_and_offload() -> None:
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    accelerator = speed({"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False})
    model, x, y = Tower(), *(mine(one) for one in data())
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.5))
    accelerator.backward(mse_loss(model(x), y))
    accelerator.clip_grad_norm_(model.parameters(), 1e9)
    with pytest.raises(ConfigurationError, match=r"stage 1 with offload_optimizer.*sync_gradients"):
        accelerator.backward(mse_loss(model(x), y))
    steps(model, optimizer, accelerator)
    close(whole(accelerator, model), reference(Tower(), torch.optim.SGD, lr=0.5))


@case
def losses_of_the_unwrapped_module_and_plain_backward_train_too() -> None:
    x, y = data()
    for stage in (1, 2):
        accelerator, model, optimizer = trained(stage)
        inner = accelerator.unwrap_model(model)
        for _ in range(3):
            accelerator.backward(mse_loss(inner(mine(x)), mine(y)))
            optimizer.step()
            optimizer.zero_grad()
        close(whole(accelerator, model), reference(Tower(), ADAM, lr=1e-2))
        accelerator, model, optimizer = trained(stage, steps=2)
        for _ in range(3):  # the loss is not divided
            mse_loss(model(mine(x)), mine(y)).backward()
            optimizer.step()
            optimizer.zero_grad()
        close(whole(accelerator, model), reference(Tower(), ADAM, lr=1e-2))


@case
def unused_layer_does_not_keep_its_last_gradient() -> None:
    x, y = data()

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            return self.one(x) + self.other(x) if both else self.one(x)

    for stage in (1, 2, 3):
        accelerator, plain, model = speed(zero_stage=stage), Two(), Two()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.5))
        sgd = torch.optim.SGD(plain.parameters(), 0.5)
        for both in (True, False, True, False):
            accelerator.backward(mse_loss(model(mine(x), both), mine(y)))
            optimizer.step()
            mse_loss(plain(x, both), y).backward()
            sgd.step()
            sgd.zero_grad()
        close(whole(accelerator, model), plain.state_dict())


# --- optimizers, schedulers, precision ------------------------------------------------------------

CONFIGURED = {
    "zero_optimization": {"stage": 2},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
}


@case
def optimizer_and_scheduler_are_created_from_the_config() -> None:
    accelerator = speed(CONFIGURED)
    model = Tower()
    optimizer = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = DummyScheduler(optimizer, total_num_steps=10 * SIZE, warmup_num_steps=4 * SIZE)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    inner = scheduler.scheduler
    assert (inner.total_num_steps, inner.warmup_num_steps) == (10, 4)
    rates = []
    x, y = data()
    for _ in range(6):
        accelerator.backward(mse_loss(model(mine(x)), mine(y)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(round(scheduler.get_last_lr()[0], 6))
    assert rates[4:] == [0.01, round(0.01 * 5 / 6, 6)], rates
    assert model.basic_optimizer.param_groups[0]["weight_decay"] == 0.1


@case
def scheduler_of_the_config_steps_itself_if_it_was_not_prepared() -> None:
    accelerator = speed(CONFIGURED | {"scheduler": {
        "type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 2,
                                       "warmup_type": "linear"}}})  # fmt: skip
    model = Tower()
    model, optimizer = accelerator.prepare(model, DummyOptim(model.parameters(), lr=0.1))
    steps(model, optimizer, accelerator, 3)
    assert optimizer.param_groups[0]["lr"] == 0.1


@case
def optimizer_and_scheduler_are_created_by_callables() -> None:
    accelerator = speed(zero_stage=1)
    model = Tower()
    optimizer = DummyOptim(model.parameters(), optimizer_callable=lambda p: ADAM(p, lr=1e-2))
    scheduler = DummyScheduler(
        optimizer,
        lr_scheduler_callable=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 1.0),
    )
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    steps(model, optimizer, accelerator)
    scheduler.step()
    close(whole(accelerator, model), reference(Tower(), ADAM, lr=1e-2))


@case
def offload_keeps_torchs_optimizer_only_on_request() -> None:
    config = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
    }
    accelerator = speed(config)
    model = Tower()
    model, optimizer = accelerator.prepare(model, torch.optim.RMSprop(model.parameters(), 1e-3))
    assert type(model.basic_optimizer) is torch.optim.RMSprop
    steps(model, optimizer, accelerator)
    close(whole(accelerator, model), reference(Tower(), torch.optim.RMSprop, lr=1e-3), 1e-5)
    accelerator = speed(zero_stage=2, offload_optimizer_device="cpu")
    model = Tower()
    with pytest.raises(ConfigurationError, match=r"no RMSprop.*zero_force_ds_cpu_optimizer"):
        accelerator.prepare(model, torch.optim.RMSprop(model.parameters(), 1e-3))


@case
def bf16_uses_the_cores_autocast_or_deepspeeds_own_on_request() -> None:
    accelerator, model, optimizer = trained(2, mixed_precision="bf16")
    assert next(model.parameters()).dtype is torch.float32
    assert model(torch.randn(2, 8)).dtype is torch.float32
    assert accelerator.scaler is None
    assert "precision" not in accelerator.backend.owns
    config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    accelerator = speed(config)
    assert accelerator.mixed_precision == "bf16"
    model = Tower()
    model, optimizer = accelerator.prepare(model, ADAM(model.parameters(), 1e-2))
    assert next(model.parameters()).dtype is torch.bfloat16
    x, y = (mine(one).bfloat16() for one in data())
    before = whole(accelerator, model)
    accelerator.backward(mse_loss(model(x).float(), y.float()))
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0) > 0
    optimizer.step()
    assert any(not torch.equal(v, before[k]) for k, v in whole(accelerator, model).items())


# --- models ---------------------------------------------------------------------------------------


@case
def zero3_init_flag_shards_parameters_during_construction() -> None:
    accelerator = speed(zero_stage=3, zero3_init_flag=True)
    with accelerator.init_model_context():
        model = Tower()
    weight = model.layers[0].weight
    assert weight.numel() == 0
    assert tuple(weight.ds_shape) == (8, 8)
    with GatheredParameters(model.parameters(), modifier_rank=0):
        if RANK == 0:
            model.load_state_dict(Tower().state_dict())
    plugin = accelerator.deepspeed_plugin
    with plugin.zero3_init_context_manager(enable=False), accelerator.init_model_context():
        assert Tower().layers[0].weight.numel() == 64
    model, optimizer = accelerator.prepare(model, ADAM(model.parameters(), lr=1e-2))
    steps(model, optimizer, accelerator)
    close(whole(accelerator, model), reference(Tower(), ADAM, lr=1e-2))


class Expert(nn.Linear):
    pass


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The chosen expert depends on the samples, so it differs between ranks.
        chosen = int(x.sum() > 0) + RANK % 2
        return self.experts[chosen](x)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block = nn.Linear(8, 8), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.first(x))


@case
def expert_modules_are_gathered_as_a_whole() -> None:
    accelerator = speed(zero_stage=3, transformer_moe_cls_names="Experts")
    model = Mixture()
    model, optimizer = accelerator.prepare(model, ADAM(model.parameters(), lr=1e-2))
    x, y = data()
    before = whole(accelerator, model)
    for _ in range(2):
        accelerator.backward(mse_loss(model(mine(x)), mine(y)))
        optimizer.step()
    assert any(not torch.equal(v, before[k]) for k, v in whole(accelerator, model).items())
    accelerator = speed(zero_stage=3, transformer_moe_cls_names="Expertz")
    model = Mixture()
    with pytest.raises(ConfigurationError, match=r"'Expertz'.*Did you mean 'Expert"):
        accelerator.prepare(model, ADAM(model.parameters()))


@case
def each_model_has_its_own_engine() -> None:
    accelerator = speed(zero_stage=2)
    one, other = Tower(0), Tower(1)
    o1, o2 = ADAM(one.parameters(), lr=1e-2), torch.optim.SGD(other.parameters(), lr=0.5)
    m1, m2, o1, o2 = accelerator.prepare(one, other, o1, o2)
    x, y = data()
    plain1, plain2 = Tower(0), Tower(1)
    p1, p2 = ADAM(plain1.parameters(), lr=1e-2), torch.optim.SGD(plain2.parameters(), lr=0.5)
    for _ in range(2):
        # One loss for each model, and then one loss through both.
        accelerator.backward(mse_loss(m1(mine(x)), mine(y)))
        o1.step()
        accelerator.backward(mse_loss(m2(mine(x)), mine(y)))
        o2.step()
        mse_loss(plain1(x), y).backward()
        p1.step()
        mse_loss(plain2(x), y).backward()
        p2.step()
        p1.zero_grad()
        p2.zero_grad()
        accelerator.backward(mse_loss(m2(m1(mine(x))), mine(y)))
        both = [*m1.parameters(), *m2.parameters()]
        norm = accelerator.clip_grad_norm_(both, 0.02)
        mse_loss(plain2(plain1(x)), y).backward()
        expected = nn.utils.clip_grad_norm_([*plain1.parameters(), *plain2.parameters()], 0.02)
        assert abs(float(norm) - float(expected)) < 1e-6
        for optimizer in (o1, o2, p1, p2):
            optimizer.step()
            optimizer.zero_grad()
    close(whole(accelerator, m1), plain1.state_dict(), 1e-5)
    close(whole(accelerator, m2), plain2.state_dict(), 1e-5)


@case
def generator_and_discriminator_train_together() -> None:
    x, _ = data()
    for stage in (0, 1, 2, 3):
        accelerator = speed(zero_stage=stage)
        generator, judge = Tower(0), Tower(1)
        plain = [Tower(0), Tower(1)]
        expected = [torch.optim.SGD(m.parameters(), 0.2) for m in plain]
        prepared = [torch.optim.SGD(m.parameters(), 0.2) for m in (generator, judge)]
        generator, judge, *prepared = accelerator.prepare(generator, judge, *prepared)
        for _ in range(3):
            for made, judged, optimizers, rows, backward in (
                (generator, judge, prepared, mine(x), accelerator.backward),
                (*plain, expected, x, torch.Tensor.backward),
            ):
                fake = made(rows)  # this forward is older than the judge's backward
                optimizers[1].zero_grad()
                backward(judged(rows).mean() - judged(fake.detach()).mean())
                optimizers[1].step()
                optimizers[0].zero_grad()
                backward(judged(fake).pow(2).mean())
                optimizers[0].step()
        close(whole(accelerator, generator), plain[0].state_dict())
        close(whole(accelerator, judge), plain[1].state_dict())


@case
def losses_of_two_models_can_be_used_in_any_order() -> None:
    x, y = data()
    for stage in (0, 1, 2, 3):
        accelerator = speed(zero_stage=stage)
        models = [Tower(0), Tower(1)]
        expected = [reference(m, ADAM, lr=1e-2, count=2) for m in models]
        optimizers = [ADAM(m.parameters(), lr=1e-2) for m in models]
        *models, first, second = accelerator.prepare(*models, *optimizers)
        for order in ((0, 1), (1, 0)):
            losses = [mse_loss(m(mine(x)), mine(y)) for m in models]
            for number in order:
                optimizer = (first, second)[number]
                optimizer.zero_grad()
                accelerator.backward(losses[number])
                optimizer.step()
        for model, weights in zip(models, expected, strict=True):
            close(whole(accelerator, model), weights)


@case
def free_memory_frees_engines() -> None:
    import gc
    import weakref

    for stage in (2, 3):
        accelerator, model, optimizer = trained(stage)
        steps(model, optimizer, accelerator, 1)
        inner = weakref.ref(model.module)
        model, optimizer = accelerator.free_memory(model, optimizer)
        gc.collect()
        assert inner() is None, stage
        model = Tower()
        model, optimizer = accelerator.prepare(model, ADAM(model.parameters(), lr=1e-2))
        steps(model, optimizer, accelerator)
        close(whole(accelerator, model), reference(Tower(), ADAM, lr=1e-2))


@case
def plugins_are_selected_by_name() -> None:
    plugins = {"student": DeepSpeedPlugin(zero_stage=2), "teacher": DeepSpeedPlugin(zero_stage=3)}
    accelerator = Accelerator(cpu=True, deepspeed_plugins=plugins, process_group_timeout=PG_TIMEOUT)
    student = Tower(0)
    student, optimizer = accelerator.prepare(student, ADAM(student.parameters(), lr=1e-2))
    assert student.zero_optimization_stage() == 2
    accelerator.state.select_deepspeed_plugin("teacher")
    assert accelerator.deepspeed_plugin.stage == 3
    assert get_active_deepspeed_plugin() is accelerator.deepspeed_plugin
    assert get_active_deepspeed_plugin(accelerator.state) is accelerator.deepspeed_plugin
    teacher = accelerator.prepare(Tower(1).requires_grad_(False))
    assert teacher.zero_optimization_stage() == 3
    assert accelerator.state.get_deepspeed_plugin("student").stage == 2
    with pytest.raises(ConfigurationError, match=r"'techer'.*Did you mean 'teacher'"):
        accelerator.state.select_deepspeed_plugin("techer")
    x, _y = data()
    with torch.no_grad():
        wanted = teacher(mine(x))
    torch.testing.assert_close(wanted, Tower(1)(mine(x)))
    accelerator.backward(mse_loss(student(mine(x)), wanted))
    optimizer.step()


@case
def model_without_optimizer_has_no_engine() -> None:
    accelerator = speed(zero_stage=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = accelerator.prepare(Tower().requires_grad_(False))
    assert type(model) is Tower
    accelerator, model, _ = trained(2)
    inner = accelerator.unwrap_model(model)
    assert type(inner) is Tower
    assert inner is model.module


@case
def checkpoint_contains_frozen_parameters_and_buffers() -> None:
    class Frozen(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.arange(3.0))
            self.layers[1].requires_grad_(False)

    for stage in (1, 2, 3):
        accelerator = speed(zero_stage=stage)
        model = Frozen()
        optimizer = ADAM([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        steps(model, optimizer, accelerator)
        expected = whole(accelerator, model)
        target = scratch(f"frozen{stage}") / "checkpoint"
        accelerator.save_state(target)
        merged = merge(target / "backend_deepspeed" / "engine_0")
        assert merged.keys() == expected.keys(), (stage, merged.keys() ^ expected.keys())
        close(merged, expected, 0)


@case
def compiled_engine_trains_like_the_uncompiled_one() -> None:
    for stage in (2, 3):
        accelerator = speed(zero_stage=stage, dynamo_backend="eager")
        model = Tower()
        model, optimizer = accelerator.prepare(model, ADAM(model.parameters(), lr=1e-2))
        assert model.is_compiled
        steps(model, optimizer, accelerator)
        close(whole(accelerator, model), reference(Tower(), ADAM, lr=1e-2))


@case
def regional_compilation_compiles_blocks() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x))

    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    expected = reference(copy.deepcopy(model), ADAM, lr=1e-2)
    dynamo = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    accelerator = speed(zero_stage=2, dynamo_plugin=dynamo)
    model, optimizer = accelerator.prepare(model, ADAM(model.parameters(), lr=1e-2))
    assert [is_compiled_module(block) for block in model.module] == [True] * 3
    assert not model.is_compiled
    steps(model, optimizer, accelerator)
    close(whole(accelerator, model), expected)


@case
def tensor_parallelism_splits_layers_and_ranks_read_the_same_samples() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.relu(self.up(x)))

    tensor = {
        "autotp_size": 2,
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [
                {"patterns": [".*up.weight$"], "partition_type": "column"},
                {"patterns": [".*down.weight$"], "partition_type": "row"},
            ],
        },
    }
    x, y = data()
    plain = Pair()
    sgd = torch.optim.SGD(plain.parameters(), 0.1)
    losses = []
    for _ in range(3):
        loss = mse_loss(plain(x), y)
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        losses.append(loss.item())
    sizes = ParallelismConfig(tp_size=2)
    for config, more in (
        ({"zero_optimization": {"stage": 1}, "tensor_parallel": tensor}, {}),
        (
            {
                "zero_optimization": {"stage": 1},
                "tensor_parallel": {"partition_config": tensor["partition_config"]},
            },
            {"parallelism_config": sizes},
        ),
    ):
        accelerator = speed(config, **more)
        assert accelerator.parallelism_config.tp_size == 2
        model = Pair()
        loader = DataLoader(TensorDataset(x, y), 8)
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), 0.1), loader
        )
        assert tuple(model.module.up.weight.shape) == (8, 8)
        found = []
        for _ in range(3):
            for one, other in loader:
                assert len(one) == 8  # both ranks get the whole batch
                loss = mse_loss(model(one), other)
                accelerator.backward(loss)
                optimizer.step()
                found.append(loss.item())
        assert max(abs(a - b) for a, b in zip(found, losses, strict=True)) < 1e-6, (found, losses)


@case
def ulysses_splits_sequences() -> None:
    from torch.nn.functional import cross_entropy
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3NextConfig

    def llama():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, attn_implementation="sdpa",
        )  # fmt: skip
        return LlamaForCausalLM(config)

    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (6, 16), generator=generator)
    rows = [{"input_ids": one, "position_ids": torch.arange(16), "labels": one} for one in tokens]
    plain = llama()
    sgd = torch.optim.SGD(plain.parameters(), 0.5)
    expected = []
    for batch in DataLoader(rows, 2):
        logits = plain(batch["input_ids"], position_ids=batch["position_ids"]).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        expected.append(loss.item())
    from accelerate_deepspeed import DeepSpeedSequenceParallelConfig

    for stage in (2, 3):
        sizes = ParallelismConfig(
            sp_size=2, sp_backend="deepspeed", sp_handler=DeepSpeedSequenceParallelConfig()
        )
        accelerator = speed(zero_stage=stage, parallelism_config=sizes)
        model = llama()
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), 0.5), DataLoader(rows, 2)
        )
        found = []
        for batch in loader:
            assert batch["input_ids"].shape == (2, 8)
            assert "labels" not in batch
            labels = batch["shift_labels"].flatten()
            count = (labels != -100).sum()
            with accelerator.accumulate(model, num_items=count):
                logits = model(batch["input_ids"], position_ids=batch["position_ids"]).logits
                loss = cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            both = accelerator.reduce(torch.stack([loss.detach(), count.float()]), "sum")
            found.append(float(both[0] / both[1]))
        worst = max(abs(a - b) for a, b in zip(found, expected, strict=True))
        assert worst < 1e-5, (found, expected)
        accelerator.end_training()
    config = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2}
    accelerator = speed(config, parallelism_config=ParallelismConfig(sp_size=2))
    model = Tower()
    with pytest.raises(ConfigurationError, match="only supports Transformers models, and Tower"):
        accelerator.prepare(model, ADAM(model.parameters()))
    model = Tower()
    model.config = Qwen3NextConfig(num_hidden_layers=4)
    with pytest.raises(ConfigurationError, match="Tower has layers with linear attention"):
        accelerator.prepare(model, ADAM(model.parameters()))


# --- checkpoints ----------------------------------------------------------------------------------


@case
def another_stage_resumes_with_buffers_and_frozen_parameters() -> None:
    class Counted(Tower):
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            self.norm = nn.BatchNorm1d(8)
            self.layers[1].requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(super().forward(x))

    def made(stage, seed):
        accelerator, model = speed(zero_stage=stage), Counted(seed)
        optimizer = ADAM([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        return (accelerator, *accelerator.prepare(model, optimizer))

    accelerator, model, optimizer = made(1, 0)
    steps(model, optimizer, accelerator, 2)
    target = scratch("universal") / "checkpoint"
    accelerator.save_state(target)
    expected = whole(accelerator, model)
    other, model, optimizer = made(2, 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*universal format", UserWarning)
        other.load_state(target)
    close(whole(other, model), expected, 0)


@case
def merge_reads_weights_without_an_engine() -> None:
    for stage in (0, 1, 2, 3):
        accelerator, model, optimizer = trained(stage)
        steps(model, optimizer, accelerator, 2)
        target = scratch(f"merge{stage}") / "checkpoint"
        accelerator.save_state(target)
        close(merge(target / "backend_deepspeed" / "engine_0"), whole(accelerator, model), 0)


@case
def save_model_writes_whole_weights() -> None:
    for stage in (2, 3):
        accelerator, model, optimizer = trained(stage)
        steps(model, optimizer, accelerator, 1)
        expected = whole(accelerator, model)
        target = scratch(f"model{stage}")
        accelerator.save_model(model, target)
        accelerator.wait_for_everyone()
        from safetensors.torch import load_file

        close(load_file(target / "model.safetensors"), expected, 0)


@case
def engine_is_accessible_under_accelerates_names() -> None:
    accelerator, model, optimizer = trained(3, zero3_save_16bit_model=True)
    assert accelerator.deepspeed_engine_wrapped.engine is model
    x, y = data()
    accelerator.backward(mse_loss(model(mine(x)), mine(y)))
    expected = accelerator.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    norm = accelerator.deepspeed_engine_wrapped.get_global_grad_norm()
    assert abs(norm - float(expected)) < 1e-7, "before clipping"
    target = scratch("halves")
    assert model.save_16bit_model(str(target))
    accelerator.wait_for_everyone()
    close(torch.load(target / "pytorch_model.bin"), whole(accelerator, model), 0)


@case
def incompatible_and_malicious_checkpoints_are_rejected_on_all_ranks() -> None:
    accelerator, model, optimizer = trained(2)
    steps(model, optimizer, accelerator, 1)
    target = scratch("strange") / "checkpoint"
    accelerator.save_state(target)
    with pytest.raises(ConfigurationError, match=r"load_module_onli.*load_module_only"):
        accelerator.load_state(target, load_module_onli=True)
    other, _model3, _ = trained(3)
    with pytest.raises(CheckpointError, match=r"stage 2 on 2 ranks.*stage 3|stage 2 on \d"):
        other.load_state(target)
    accelerator.wait_for_everyone()
    file = target / "backend_deepspeed" / "engine_0" / "mp_rank_00_model_states.pt"
    if RANK == 0:
        torch.save({"module": {}, "evil": Evil()}, file)
    accelerator.wait_for_everyone()
    with pytest.raises(CheckpointError):
        accelerator.load_state(target)  # detected with the manifest
    from accelerate_deepspeed import checkpoint

    with pytest.raises(CheckpointError, match="Evil"):
        checkpoint.load(accelerator, target / "backend_deepspeed", {})
    assert not Evil.made


class Evil:
    made = False

    def __setstate__(self, state: object) -> None:
        type(self).made = True

    def __getstate__(self) -> object:
        return {"some": "state"}


# --- invalid input --------------------------------------------------------------------------------


def refused(text: str, config=None, **options) -> None:
    with pytest.raises(ConfigurationError, match=text):
        speed(config, **options)


@case
def error_for_a_contradiction_names_both_sources() -> None:
    zero = {"zero_optimization": {"stage": 3}}
    refused(r"zero_stage=2.*deepspeed_plugin.*zero_optimization\.stage=3", zero, zero_stage=2)
    speed(zero, zero_stage=3)
    refused(r"offload_optimizer_device='cpu'.*'none'", {"zero_optimization": {
        "stage": 2, "offload_optimizer": {"device": "none"}}}, offload_optimizer_device="cpu")  # fmt: skip
    steps_ = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 4}
    refused(r"gradient_accumulation_steps=2.*contradicts 4", steps_, steps=2)
    assert speed(steps_).gradient_accumulation_steps == 4
    assert speed(zero_stage=1, gradient_accumulation_steps=2).gradient_accumulation_steps == 2
    bf16 = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    refused(r"mixed_precision='fp16'.*bf16\.enabled", bf16, mixed_precision="fp16")
    refused(r"mixed_precision='no'.*bf16", bf16, mixed_precision="no")


@case
def unknown_keys_and_invalid_values_are_rejected() -> None:
    refused(r"'zero_optimisation'.*Did you mean 'zero_optimization'", {"zero_optimisation": {}})
    refused(
        r"reduce_bucket_siz.*no such setting.*reduce_bucket_size",
        {"zero_optimization": {"stage": 2, "reduce_bucket_siz": 5}},
    )
    zero = {"zero_optimization": {"stage": 1}}
    refused(r"fp16\.enabeld.*Did you mean 'enabled'", zero | {"fp16": {"enabeld": True}})
    refused(r"torch_autocast\.dtyp.*'dtype'", zero | {"torch_autocast": {"dtyp": "bfloat16"}})
    refused(r"optimizer\.type='AdamX'", zero | {"optimizer": {"type": "AdamX", "params": {}}})
    refused(r"gradient_accumulation_steps='two'", zero | {"gradient_accumulation_steps": "two"})
    refused(r"gradient_clipping=-1", zero | {"gradient_clipping": -1})
    refused(r"stage=4.*Allowed values are '0', '1', '2', '3'", {"zero_optimization": {"stage": 4}})
    refused(r"offload_param\.device='cpu'.*needs ZeRO stage 3", {"zero_optimization": {
        "stage": 2, "offload_param": {"device": "cpu"}}})  # fmt: skip
    refused(r"offload_param_nvme_path", zero_stage=3, offload_param_device="nvme")
    refused(r"is not an existing file, JSON", "no_such_config.json")


@case
def offload_to_nvme_is_rejected_if_async_io_cannot_be_compiled() -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    nvme = {"device": "nvme", "nvme_path": str(scratch("nvme"))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=True: False)
        refused(
            r"offload_optimizer\.device='nvme'.*async_io.*libaio",
            {"zero_optimization": {"stage": 3, "offload_optimizer": nvme}},
        )


@case
def contradicting_batch_sizes_are_rejected() -> None:
    def prepare(config, batch=None):
        accelerator = speed({"zero_optimization": {"stage": 1}, **config}, steps=2)
        model = Tower()
        objects = [model, ADAM(model.parameters())]
        if batch:
            objects.append(DataLoader(TensorDataset(*data()), batch))
        return accelerator, accelerator.prepare(*objects)[0]

    total = {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}
    with pytest.raises(ConfigurationError, match=r"train_batch_size=7.*is not.*=2.*2 accum"):
        prepare(total)
    with pytest.raises(ConfigurationError, match=r"train_batch_size=7.*not divisible"):
        prepare({"train_batch_size": 7})
    autos = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
             "gradient_accumulation_steps": "auto"}  # fmt: skip
    accelerator, engine = prepare(autos, batch=3)
    assert engine.train_micro_batch_size_per_gpu() == 3
    assert engine.train_batch_size() == 3 * 2 * SIZE
    assert engine.gradient_accumulation_steps() == 2
    assert accelerator.deepspeed_plugin.deepspeed_config["train_batch_size"] == 6 * SIZE
    _, engine = prepare({"train_batch_size": 8 * SIZE})
    assert engine.train_micro_batch_size_per_gpu() == 4
    prepare(autos)  # a loop without a loader


@case
def model_and_its_optimizer_must_be_prepared_together() -> None:
    accelerator = speed(zero_stage=2)
    model = Tower()
    with pytest.raises(PrepareError, match=r"AdamW without its model"):
        accelerator.prepare(ADAM(model.parameters()))
    one, other = Tower(), Tower()
    with pytest.raises(PrepareError, match="several models"):
        accelerator.prepare(one, other, ADAM([*one.parameters(), *other.parameters()]))
    with pytest.raises(PrepareError, match="two optimizers"):
        accelerator.prepare(
            one, ADAM(one.layers[0].parameters()), ADAM(one.layers[1:].parameters())
        )
    outside = nn.Parameter(torch.ones(2))
    with pytest.raises(PrepareError, match=r"1 parameter\(s\) that are not in Tower"):
        accelerator.prepare(one, ADAM([*one.parameters(), outside]))
    with pytest.raises(ConfigurationError, match=r"DummyOptim is a placeholder for"):
        accelerator.prepare(one, DummyOptim(one.parameters()))
    accelerator = speed(CONFIGURED)
    with pytest.raises(
        ConfigurationError, match=r"has an optimizer, but prepare also received a AdamW"
    ):
        accelerator.prepare(one, ADAM(one.parameters()))
    with pytest.raises(ConfigurationError, match=r'scheduler\.params\.\w+ is "auto"'):
        accelerator.prepare(one, DummyOptim(one.parameters()))


@case
def configs_can_be_dicts_files_or_strings() -> None:
    import base64

    config = {"zero_optimization": {"stage": 1}}
    text = json.dumps(config)
    file = scratch("config") / "ds.json"
    if RANK == 0:
        file.write_text(text)
    KEPT.wait_for_everyone()
    from accelerate_deepspeed import HfDeepSpeedConfig

    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    for given in (config, text, str(file), file, encoded, HfDeepSpeedConfig(config)):
        assert speed(given).deepspeed_plugin.stage == 1
    assert config == {"zero_optimization": {"stage": 1}}


if __name__ == "__main__":
    run_cases()
    KEPT.end_training()
