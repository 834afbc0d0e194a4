"""Assignments to attributes after the Accelerator was created."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support import case_names, check_case, run_workers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_core import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientState,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    PartialState,
    ProjectConfiguration,
)
from accelerate_core.errors import AssignmentError
from accelerate_core.utils import DistributedDataParallelKwargs, ProfileKwargs, TorchDynamoPlugin
from accelerate_drop_in import assignment
from accelerate_drop_in.accelerator import Accelerator
from accelerate_drop_in.by_hand import AcceleratorState
from accelerate_drop_in.fp8 import FP8BackendType

HERE = Path(__file__).parent

#: The attributes of Accelerate 1.15's Accelerator that are plain or have a setter.
PLAIN = [
    "_custom_objects",
    "_dataloaders",
    "_models",
    "_optimizers",
    "_schedulers",
    "ao_recipe_handler",
    "autocast_handler",
    "dataloader_config",
    "ddp_handler",
    "deepspeed_engine_wrapped",
    "delayed_fp8_autocast",
    "device_placement",
    "even_batches",
    "flag_tensor",
    "fp8_enabled",
    "fp8_recipe_handler",
    "gradient_accumulation_steps",
    "gradient_state",
    "has_fp8_handler",
    "has_lomo_optimizer",
    "init_handler",
    "log_with",
    "msamp_recipe_handler",
    "native_amp",
    "profile_handler",
    "project_configuration",
    "rng_types",
    "scaler",
    "scaler_handler",
    "state",
    "step",
    "step_scheduler_with_optimizer",
    "sync_gradients",
    "te_recipe_handler",
    "trackers",
]


@pytest.fixture
def accelerator():
    made = Accelerator(cpu=True)
    yield made
    made.end_training()


def test_every_assignable_attribute_of_accelerate_has_a_rule() -> None:
    assert set(PLAIN) <= set(assignment.ACCELERATOR)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("autocast_handler", AutocastKwargs(enabled=False)),
        ("dataloader_config", DataLoaderConfiguration(split_batches=True)),
        ("ddp_handler", DistributedDataParallelKwargs(bucket_cap_mb=3)),
        ("profile_handler", ProfileKwargs(activities=["cpu"])),
        ("project_configuration", ProjectConfiguration()),
        ("device_placement", False),
        ("even_batches", False),
        ("gradient_accumulation_steps", 4),
        ("rng_types", ["torch"]),
        ("step", 3),
        ("step_scheduler_with_optimizer", False),
        ("sync_gradients", False),
        ("flag_tensor", torch.ones(1)),
        ("_models", [nn.Linear(1, 1)]),
        ("_custom_objects", [nn.Linear(1, 1)]),
        ("deepspeed_engine_wrapped", None),
        ("mine", "an attribute of the script"),
    ],
)
def test_attribute_returns_the_assigned_value(accelerator, name: str, value: Any) -> None:
    setattr(accelerator, name, value)
    found = getattr(accelerator, name)
    assert found is value or found == value


@pytest.mark.parametrize("name", ["ddp_handler", "dataloader_config", "project_configuration"])
def test_assigned_value_of_another_type_is_refused(accelerator, name: str) -> None:
    with pytest.raises(AssignmentError, match=f"{name} must be a .*'text'"):
        setattr(accelerator, name, "text")


@pytest.mark.parametrize(
    ("name", "value"),
    [("scaler_handler", GradScalerKwargs()), ("init_handler", InitProcessGroupKwargs())],
)
def test_assignment_without_effect_in_accelerate_is_a_warning(accelerator, name, value) -> None:
    with pytest.warns(UserWarning, match=f"{name} = ... has no effect"):
        setattr(accelerator, name, value)
    assert getattr(accelerator, name) is value


@pytest.mark.parametrize(
    "name",
    [name for name, rule in assignment.ACCELERATOR.items() if rule.effect == "refused"],
)
def test_refused_assignments_say_what_to_do_instead(accelerator, name: str) -> None:
    with pytest.raises(AssignmentError, match=f"{name} cannot be replaced: ...*"):
        setattr(accelerator, name, object())
    if name not in ("fp8_backend",):
        setattr(accelerator, name, getattr(accelerator, name))


@pytest.mark.parametrize(
    "name",
    [name for name, rule in assignment.STATE.items() if rule.effect == "refused"],
)
def test_state_refuses_attributes_that_cannot_change(accelerator, name: str) -> None:
    with pytest.raises(AssignmentError, match=f"{name} cannot be replaced"):
        setattr(accelerator.state, name, object())


#: The plain attributes of Accelerate 1.15's states.
PLAIN_STATE = [
    "_cpu",
    "_mixed_precision",
    "backend",
    "debug",
    "deepspeed_plugins",
    "device",
    "device_mesh",
    "distributed_type",
    "dynamo_plugin",
    "fork_launched",
    "fsdp_plugin",
    "local_process_index",
    "megatron_lm_plugin",
    "num_processes",
    "parallelism_config",
    "process_index",
    "torch_tp_plugin",
]


@pytest.mark.parametrize("name", PLAIN_STATE)
def test_every_attribute_of_a_state_has_a_rule(accelerator, name: str) -> None:
    assert name in assignment.STATE
    for state in (accelerator.state, PartialState()):
        with pytest.raises(AttributeError):
            setattr(state, name, object())


def test_is_xla_gradients_synced_cannot_be_set(accelerator) -> None:
    accelerator.gradient_state.is_xla_gradients_synced = False
    with pytest.raises(AssignmentError, match="the backend reduces gradients"):
        accelerator.gradient_state.is_xla_gradients_synced = True


def test_other_attributes_are_shared_by_all_states(accelerator) -> None:
    accelerator.state.mine = [1]
    assert AcceleratorState().mine is PartialState().mine is accelerator.state.mine
    PartialState().other = 2
    assert accelerator.state.other == 2
    assert not hasattr(accelerator.state, "unknown")


def test_attribute_of_a_plugin_cannot_be_hidden() -> None:
    with Accelerator(cpu=True, mixed_precision="fp8") as accelerator:
        assert accelerator.fp8_backend is FP8BackendType.AO
        with pytest.raises(AssignmentError, match="the recipe is part of the precision"):
            accelerator.fp8_recipe_handler = None


def test_accumulation_settings_can_be_changed_by_name(accelerator) -> None:
    settings = accelerator.gradient_state.plugin_kwargs
    settings.update({"num_steps": 3})
    settings["sync_each_batch"] = True
    assert accelerator.gradient_accumulation_steps == 3
    assert GradientState().sync_each_batch
    accelerator.gradient_state.plugin_kwargs = {"num_steps": 2}
    assert settings["num_steps"] == 2
    assert settings.get("sync_with_dataloader") is True
    with pytest.raises(ValueError, match="Did you mean 'num_steps'"):
        settings["num_step"] = 2
    with pytest.raises(ValueError, match="whole number above 0"):
        settings["num_steps"] = 0


def test_assigned_project_configuration_is_used_by_the_next_save(accelerator, tmp_path) -> None:
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(str(tmp_path / "first"))  # creates the checkpointer
    accelerator.project_configuration = ProjectConfiguration(
        project_dir=str(tmp_path), automatic_checkpoint_naming=True
    )
    saved = accelerator.save_state()
    assert Path(saved) == tmp_path / "checkpoints" / "checkpoint_0"
    accelerator.project_configuration.iteration = 7
    assert accelerator.save_state().endswith("checkpoint_7")


def test_assigned_device_placement_is_used_by_later_prepare_calls(accelerator) -> None:
    accelerator.device_placement = False
    made = accelerator.prepare(DataLoader(TensorDataset(torch.ones(4)), 2))
    assert made.options.put_on_device is False


def test_assigned_step_scheduler_with_optimizer_is_used(accelerator) -> None:
    accelerator.step_scheduler_with_optimizer = False
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    assert accelerator.prepare(scheduler).step_with_optimizer is False


def test_assigned_compiler_is_used_or_refused_but_not_ignored(accelerator) -> None:
    plugin = TorchDynamoPlugin(backend="aot_eager")
    with pytest.raises(AssignmentError, match="dynamo_backend='aot_eager'"):
        accelerator.state.dynamo_plugin = plugin
    accelerator.state.dynamo_plugin.backend = "aot_eager"
    with pytest.raises(AssignmentError, match="dynamo_backend='aot_eager'"):
        accelerator.prepare(nn.Linear(2, 2))
    with Accelerator(cpu=True, dynamo_backend="eager") as compiles:
        compiles.state.dynamo_plugin = plugin
        assert compiles.dynamo_plugin is plugin


def test_handlers_that_were_not_given_are_none(accelerator) -> None:
    assert accelerator.ddp_handler is None
    assert accelerator.fp8_backend is FP8BackendType.NO
    assert accelerator.fp8_backend == "NO"
    handler = DistributedDataParallelKwargs()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Accelerator(cpu=True, kwargs_handlers=[handler]) as given:
            assert given.ddp_handler is handler


@pytest.fixture(scope="module")
def run():
    return run_workers(HERE / "assignment_worker.py", 2, timeout=120, env={"OMP_NUM_THREADS": "1"})


@pytest.mark.dist
@pytest.mark.parametrize("case", case_names(HERE / "assignment_worker.py"))
def test_on_two_ranks(run, case):
    check_case(run, case)
