"""A training loop on one process behaves exactly like plain PyTorch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accelerate_core import Accelerator, Backend, DistributedType
from accelerate_core.errors import (
    CheckpointError,
    ConfigurationError,
    MissingPluginError,
    PluginError,
    PrepareError,
)
from accelerate_core.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)

CPU = {"cpu": True}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def make() -> tuple[Net, Any, Any, DataLoader]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    data = TensorDataset(torch.randn(26, 8), torch.arange(26) % 4)
    return net, optimizer, scheduler, DataLoader(data, batch_size=4, shuffle=True)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def plain(precision: str, accumulation: int) -> tuple[list[float], torch.Tensor]:
    net, optimizer, scheduler, data = make()
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    losses = []
    for _ in range(2):
        for index, (x, y) in enumerate(data):
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = cross_entropy(net(x), y)
            losses.append(loss.item())
            scaler.scale(loss / accumulation).backward()
            if (index + 1) % accumulation == 0 or index + 1 == len(data):
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                optimizer.zero_grad()
    return losses, flat(net)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_training_is_bitwise_equal_to_plain_torch(precision, accumulation):
    losses = []
    with Accelerator(
        **CPU, mixed_precision=precision, gradient_accumulation_steps=accumulation
    ) as accelerator:
        model, optimizer, scheduler, data = accelerator.prepare(*make())
        for _ in range(2):
            for x, y in data:
                with accelerator.accumulate(model):
                    loss = cross_entropy(model(x), y)
                    losses.append(loss.item())
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
    expected, weights = plain(precision, accumulation)
    assert losses == expected
    assert torch.equal(flat(model), weights)


def test_metrics_gathered_from_a_short_last_batch_are_cut_to_its_samples():
    with Accelerator(**CPU) as accelerator:
        loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(10.0), batch_size=4))
        sizes = [
            # As in Transformers' Trainer: the mean of a batch, repeated for each sample of a full batch.
            (len(accelerator.gather_for_metrics(batch.mean().repeat(4))),
             len(accelerator.gather_for_metrics(batch)))
            for batch in loader
        ]  # fmt: skip
        assert sizes == [(4, 4), (4, 4), (2, 2)]


def test_distributed_methods_have_no_effect_on_one_process():
    with Accelerator(**CPU) as accelerator:
        model = accelerator.prepare(Net())
        x = torch.arange(3.0)
        assert torch.equal(accelerator.gather(x), x)
        assert torch.equal(accelerator.reduce(x, "mean"), x)
        assert torch.equal(accelerator.pad_across_processes(x), x)
        assert accelerator.gather_for_metrics(["a"]) == ["a"]
        with accelerator.split_between_processes([1, 2, 3], apply_padding=True) as part:
            assert part == [1, 2, 3]
        contexts = [
            accelerator.no_sync(),
            accelerator.no_sync(model),
            accelerator.trigger_sync_in_backward(model),
            accelerator.join_uneven_inputs([model], even_batches=False),
            accelerator.maybe_context_parallel(buffers=[x], buffer_seq_dims=[0]),
            accelerator.main_process_first(),
            accelerator.local_main_process_first(),
            accelerator.autocast(),
        ]
        for context in contexts:
            with context:
                accelerator.backward(model(torch.ones(1, 8)).sum())
        assert torch.equal(x, torch.arange(3.0))
        accelerator.wait_for_everyone()
        accelerator.set_trigger()
        assert accelerator.check_trigger()
        assert not accelerator.check_trigger()
        for decorate in (accelerator.on_main_process, accelerator.on_last_process):
            assert decorate(lambda: 7)() == 7
        assert accelerator.on_process(lambda: 7, process_index=1)() is None


# --- prepare --------------------------------------------------------------------------------------


def test_prepare_keeps_the_order_and_returns_unknown_objects_unchanged():
    net, optimizer, scheduler, data = make()
    with Accelerator(**CPU) as accelerator:
        note = object()
        prepared = accelerator.prepare(data, note, net, scheduler, optimizer, None)
        assert prepared[1] is note
        assert prepared[2] is net
        assert prepared[3].scheduler is scheduler
        assert prepared[4].optimizer is optimizer
        assert prepared[5] is None
        assert prepared[3].optimizers == [prepared[4]]
        again = accelerator.prepare(*prepared)
        assert all(one is other for one, other in zip(again, prepared, strict=True))
        assert len(accelerator.models) == len(accelerator.optimizers) == 1
        assert isinstance(prepared[4], torch.optim.Optimizer)


def test_prepare_methods_for_single_objects_work_like_prepare():
    net, optimizer, scheduler, data = make()
    with Accelerator(**CPU) as accelerator:
        assert accelerator.prepare_model(net) is net
        wrapped = accelerator.prepare_optimizer(optimizer)
        assert accelerator.prepare_scheduler(scheduler).optimizers == [wrapped]
        assert accelerator.prepare_data_loader(data).dataset is data.dataset
        judged = accelerator.prepare_model(Net(), evaluation_mode=True)
        assert judged not in accelerator.models


def test_device_placement_can_be_set_globally_or_per_object():
    def collate(rows: list[int]) -> torch.Tensor:
        return torch.empty(len(rows), device="meta")

    # What is on the meta device cannot be moved by copying, so a move shows.
    net = nn.Linear(2, 2, device="meta")
    data = DataLoader(range(4), batch_size=2, collate_fn=collate)
    for default, per_object in ((False, None), (True, [False, False]), (False, [None, None])):
        with Accelerator(**CPU, device_placement=default) as accelerator:
            model, loader = accelerator.prepare(net, data, device_placement=per_object)
            assert model.weight.device.type == "meta"
            assert {batch.device.type for batch in loader} == {"meta"}
    for default, per_object in ((True, None), (False, [True])):
        with Accelerator(**CPU, device_placement=default) as accelerator:
            with pytest.raises(NotImplementedError, match="meta"):
                accelerator.prepare(net, device_placement=per_object)
            with pytest.raises(NotImplementedError, match="meta"):
                list(accelerator.prepare(data, device_placement=per_object))
    with Accelerator(**CPU) as accelerator, pytest.raises(PrepareError, match="1 entries for 2"):
        accelerator.prepare(net, data, device_placement=[True])


def test_parameter_without_an_optimizer_is_warned_about():
    net = Net()
    partial = torch.optim.SGD(net.head.parameters(), lr=0.1)
    warns = pytest.warns(UserWarning, match=r"'body.* are in no optimizer")
    with Accelerator(**CPU) as accelerator, warns:
        accelerator.prepare(net, partial)


def test_optimizer_of_another_model_is_warned_about(recwarn):
    """Its steps would not change the prepared model."""
    net, other = Net(), Net()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (net, other, other)]
    with Accelerator(**CPU) as accelerator:
        accelerator.prepare(optimizers[1])  # prepared before its model, which may follow later
        accelerator.prepare(net, optimizers[0])
        assert not [one for one in recwarn if "holds no parameter" in str(one.message)]
        with pytest.warns(
            UserWarning, match=r"SGD passed to prepare\(\) holds no parameter of a prep"
        ):
            accelerator.prepare(Net(), optimizers[2])


def test_optimizer_follows_parameters_replaced_by_prepare():
    """`downcast_bf16` replaces parameter data, and the optimizer must train the new tensors."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with Accelerator(**CPU, mixed_precision="downcast_bf16") as accelerator:
        model, optimizer = accelerator.prepare(net, optimizer)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        before = flat(model)
        accelerator.backward(model(torch.ones(2, 8)).square().sum())
        optimizer.step()
        assert not torch.equal(flat(model), before)


# --- the step -------------------------------------------------------------------------------------


def test_prepared_optimizer_behaves_like_the_original():
    net, optimizer, _, _ = make()
    with Accelerator(**CPU) as accelerator:
        model, wrapped = accelerator.prepare(net, optimizer)
        assert wrapped.param_groups is optimizer.param_groups
        assert wrapped.defaults is optimizer.defaults
        wrapped.param_groups[0]["lr"] = 0.5
        assert optimizer.param_groups[0]["lr"] == 0.5

        def closure() -> torch.Tensor:
            wrapped.zero_grad()
            loss = model(torch.ones(1, 8)).square().sum()
            accelerator.backward(loss)
            return loss

        assert isinstance(wrapped.step(closure), torch.Tensor)
        state = copy.deepcopy(wrapped.state_dict())
        assert state["state"]
        wrapped.load_state_dict(state)


def test_pickles_and_copies_of_prepared_objects_are_the_originals():
    net = torch.nn.Linear(2, 2)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 1)
    plain = DataLoader(TensorDataset(torch.arange(6)), 2)
    with Accelerator(cpu=True) as accelerator:
        prepared = accelerator.prepare(sgd, schedule, plain)
        for made, own in zip(prepared, (sgd, schedule, plain), strict=True):
            assert type(made) is not type(own)
            for twin in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
                assert type(twin) is type(own)
        assert [x.tolist() for (x,) in copy.deepcopy(prepared[2])] == [[0, 1], [2, 3], [4, 5]]


def test_schedulers_step_once_per_accumulation_cycle_and_forward_metrics():
    net, optimizer, _, _ = make()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
    with Accelerator(**CPU, gradient_accumulation_steps=2) as accelerator:
        model, optimizer, plateau = accelerator.prepare(net, optimizer, plateau)
        rates = []
        for loss in (1.0, 5.0, 5.0, 5.0):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 8)).sum())
                optimizer.step()
                plateau.step(loss)
            rates.append(plateau.get_last_lr()[0])
        # It saw the second and fourth loss, without an improvement and with patience=0.
        assert rates == pytest.approx([0.01, 0.01, 0.01, 0.001])


def test_functions_are_called_once_after_a_chosen_step():
    net, optimizer, _, _ = make()
    with Accelerator(**CPU) as accelerator:
        model, optimizer = accelerator.prepare(net, optimizer)
        seen = []

        def again(stepped):
            seen.append(stepped.steps_taken)
            stepped.call_after_step(stepped.steps_taken + 2, again)

        optimizer.call_after_step(2, again)
        optimizer.call_after_step(2, lambda stepped: seen.append("once"))
        for step in range(5):
            if step == 4:  # this step has passed
                optimizer.call_after_step(1, lambda stepped: seen.append("late"))
            accelerator.backward(model(torch.ones(1, 8)).sum())
            optimizer.step()
        assert seen == [2, "once", 4, "late"]


def test_outputs_are_converted_to_float32_by_default():
    x = torch.ones(2, 8)
    seen = []
    for arguments in (
        {},
        {"upcast_outputs": False},
        {"kwargs_handlers": [AutocastKwargs(upcast_outputs=False)]},
        {"kwargs_handlers": [AutocastKwargs(enabled=False)]},
    ):
        with Accelerator(**CPU, mixed_precision="bf16", **arguments) as accelerator:
            model = accelerator.prepare(Net())
            seen.append((model(x).dtype, model.head(torch.ones(1, 16)).dtype))
            with accelerator.autocast():
                inside = (x @ x.T).dtype
            with accelerator.autocast(AutocastKwargs(enabled=False)):
                assert (x @ x.T).dtype is torch.float32
        off = arguments.get("kwargs_handlers", [AutocastKwargs()])[0].enabled is False
        assert inside is (torch.float32 if off else torch.bfloat16)
    full, half = torch.float32, torch.bfloat16
    assert seen == [(full, full), (half, full), (half, full), (full, full)]


def test_gradient_scaler_uses_its_handlers_settings():
    handler = GradScalerKwargs(init_scale=8.0, growth_interval=1)
    with Accelerator(**CPU, mixed_precision="fp16", kwargs_handlers=[handler]) as accelerator:
        model, optimizer, _, _ = accelerator.prepare(*make())
        assert accelerator.scaler.get_scale() == 8.0
        accelerator.backward(model(torch.ones(1, 8)).sum())
        optimizer.step()
        assert accelerator.scaler.get_scale() == 16.0


def test_free_memory_returns_none_for_each_object():
    with Accelerator(**CPU) as accelerator:
        prepared = accelerator.prepare(*make())
        for name in ("free_memory", "clear"):
            assert getattr(accelerator, name)(*prepared) == [None] * 4
        assert not any((accelerator.models, accelerator.optimizers, accelerator.schedulers))


def test_lomo_optimizer_runs_its_own_backward():
    class Lomo(torch.optim.SGD):
        def fused_backward(self, loss: torch.Tensor, rate: float) -> None:
            self.called = (loss.item(), rate)

    net = Net()
    with Accelerator(**CPU) as accelerator:
        loss = net(torch.ones(1, 8)).sum()
        with pytest.raises(ConfigurationError, match="fused_backward"):
            accelerator.lomo_backward(loss, 0.1)
        model, optimizer = accelerator.prepare(net, Lomo(net.parameters(), lr=1.0))
        accelerator.backward(loss, learning_rate=0.25)
        assert optimizer.called == (loss.item(), 0.25)
        assert model.head.weight.grad is None


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "expected"),
    [
        ({"mixed_precison": "fp16"}, TypeError, "Did you mean 'mixed_precision'"),
        ({"mixed_precision": "fp61"}, ConfigurationError, "'fp61'.*constructor.*'fp16'"),
        ({"backend": "dpp"}, MissingPluginError, "Did you mean 'ddp'"),
        ({"gradient_accumulation_steps": 0}, ConfigurationError, "at least 1"),
        ({"kwargs_handlers": [3]}, ConfigurationError, "KwargsHandler"),
        (
            {"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]},
            ConfigurationError,
            "two AutocastKwargs",
        ),
        (
            {
                "gradient_accumulation_steps": 2,
                "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=3),
            },
            ConfigurationError,
            "not both",
        ),
        (
            {"dynamo_backend": "eager", "dynamo_plugin": TorchDynamoPlugin(backend="eager")},
            ConfigurationError,
            "not both",
        ),
        (
            {"dynamo_plugin": TorchDynamoPlugin(mode="max-autotune")},
            ConfigurationError,
            "dynamo_plugin sets mode='max-autotune' without a compiler",
        ),
        (
            {"dataloader_config": {"split_batches": True}},
            ConfigurationError,
            "DataLoaderConfiguration",
        ),
        ({"rng_types": ["dice"]}, ConfigurationError, "dice"),
    ],
)
def test_error_for_a_wrong_argument_explains_it(arguments, error, expected):
    with pytest.raises(error, match=expected), Accelerator(**CPU, **arguments) as accelerator:
        accelerator.prepare(make()[3])


def test_deprecated_names_work_with_a_warning():
    with pytest.warns(FutureWarning, match="split_batches"):
        accelerator = Accelerator(**CPU, split_batches=True)
    assert accelerator.split_batches
    accelerator.end_training()
    config = DataLoaderConfiguration(split_batches=True)
    with pytest.raises(ConfigurationError, match="dataloader_config"):
        Accelerator(**CPU, dataloader_config=config, split_batches=True)


# --- directories ----------------------------------------------------------------------------------


def test_missing_checkpoint_is_named(tmp_path):
    with Accelerator(**CPU) as accelerator:
        accelerator.prepare(Net())
        with pytest.raises(CheckpointError, match=r"save_state\(\) got no directory"):
            accelerator.save_state()
        with pytest.raises(CheckpointError, match="nowhere"):
            accelerator.load_state(tmp_path / "nowhere")
        accelerator.save_state(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"\0" * 9)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            accelerator.load_state(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
            accelerator.load_state(tmp_path)
        with pytest.raises(ConfigurationError, match="object"):
            accelerator.register_for_checkpointing(object(), Net())


def test_numbered_checkpoint_is_never_overwritten(tmp_path):
    config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    with Accelerator(**CPU, project_config=config) as accelerator:
        with pytest.raises(CheckpointError, match="no checkpoint"):
            accelerator.load_state()
        assert accelerator.save_state().endswith("checkpoint_0")
        config.iteration = 0
        with pytest.raises(CheckpointError, match="already exists"):
            accelerator.save_state()


def test_loading_a_checkpoint_runs_no_code_unless_trusted(tmp_path):
    class Odd:
        def __init__(self) -> None:
            self.loaded: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {"why": ValueError("an object")}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded = state

    with Accelerator(**CPU) as accelerator:
        odd = Odd()
        accelerator.register_for_checkpointing(odd)
        accelerator.save_state(tmp_path)
        with pytest.raises(CheckpointError, match="trust=True"):
            accelerator.load_state(tmp_path)
        assert odd.loaded is None
        accelerator.load_state(tmp_path, trust=True)
        assert isinstance(odd.loaded["why"], ValueError)


class Replacing(Backend):
    """Replaces a parameter, as sharding and low-precision formats do."""

    name = "replacing"
    api_version = (1, 0)
    reduces_gradients = "never"

    def prepare_model(self, model):
        model.weight = torch.nn.Parameter(model.weight.detach().clone())
        return model


def test_optimizer_prepared_before_its_model_is_rebound():
    with Accelerator(cpu=True, backend=Replacing) as accelerator:
        model = torch.nn.Linear(2, 1, bias=False)
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
        model = accelerator.prepare(model)
        before = model.weight.detach().clone()
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        assert not torch.equal(before, model.weight)


class Forgetful(Backend):
    name = "forgetful"
    api_version = (1, 0)
    reduces_gradients = "never"

    def prepare_model(self, model):
        pass


def test_hook_that_forgets_to_return_is_named():
    with (
        Accelerator(cpu=True, backend=Forgetful) as accelerator,
        pytest.raises(
            PluginError, match=r"prepare_model of backend 'forgetful' returned None; it must return"
        ),
    ):
        accelerator.prepare(torch.nn.Linear(1, 1))


def test_enumeration_members_are_singletons():
    with Accelerator(cpu=True) as accelerator:
        assert accelerator.distributed_type is DistributedType.NO
    assert DistributedType["NO"] is DistributedType.NO
    with pytest.raises(KeyError):
        DistributedType["NOTHING_SUCH"]


def test_one_cycle_schedule_reaches_its_end():
    def last(prepare):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10)
        if prepare:
            optimizer, schedule = Accelerator(cpu=True).prepare(optimizer, schedule)
        for _ in range(10):
            optimizer.step()
            schedule.step()
        return schedule.last_epoch, schedule.get_last_lr()

    assert last(True) == last(False)
