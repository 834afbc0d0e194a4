"""Attributes assigned to an Accelerator or a state after construction are used or refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import clean_environment
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_core import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    ProjectConfiguration,
)
from accelerate_core.errors import AssignmentError, ConfigurationError

#: Attributes that can be assigned, each with a valid value.
HONOURED: dict[str, Any] = {
    "autocast_handler": AutocastKwargs(enabled=False),
    "dataloader_config": DataLoaderConfiguration(split_batches=True),
    "device_placement": False,
    "even_batches": False,
    "gradient_accumulation_steps": 4,
    "project_configuration": ProjectConfiguration(),
    "rng_types": ["torch"],
    "step_scheduler_with_optimizer": False,
    "sync_gradients": False,
    "upcast_outputs": False,
}
#: Attributes that scripts can replace in Accelerate, and constructor arguments.
REFUSED = [
    *("backend", "provenance", "checkpointer", "cpu", "ddp_handler", "deepspeed_plugin", "device"),
    "dynamo_plugin",
    *("distributed_type", "fp8_enabled", "fp8_recipe_handler", "fsdp_plugin", "gradient_state"),
    *("hooks", "init_handler", "kwargs_handlers", "log_with", "megatron_lm_plugin"),
    *("mixed_precision", "num_processes", "parallelism_config", "precision", "profile_handler"),
    *("project_dir", "scaler", "scaler_handler", "scheduler_steps", "state", "trackers"),
]
#: Attributes of a state in Accelerate, and one that a script adds, which would be lost.
OF_STATE = [
    *("_cpu", "_mixed_precision", "backend", "debug", "deepspeed_plugin", "deepspeed_plugins"),
    *("device", "device_mesh", "distributed_type", "dynamo_plugin", "fork_launched", "fsdp_plugin"),
    *("local_process_index", "megatron_lm_plugin", "mine", "mixed_precision", "num_processes"),
    *("parallelism_config", "process_index", "torch_tp_plugin"),
]


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with Accelerator(cpu=True) as made:
        yield made


@pytest.mark.parametrize("name", HONOURED)
def test_assigned_value_is_kept(accelerator: Accelerator, name: str) -> None:
    setattr(accelerator, name, HONOURED[name])
    assert getattr(accelerator, name) == HONOURED[name]


def test_loaders_use_settings_assigned_before_they_were_prepared(
    accelerator: Accelerator,
) -> None:
    accelerator.dataloader_config = DataLoaderConfiguration(even_batches=False)
    accelerator.device_placement = False
    accelerator.rng_types = ["torch"]
    options = accelerator.prepare(DataLoader(TensorDataset(torch.ones(4)), 2)).options
    assert options.config is accelerator.dataloader_config
    assert options.put_on_device is False
    assert options.rng_types == ["torch"]


def test_next_save_uses_the_assigned_project_configuration(
    accelerator: Accelerator, tmp_path: Any
) -> None:
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.project_configuration = ProjectConfiguration(
        project_dir=str(tmp_path), automatic_checkpoint_naming=True
    )
    assert str(accelerator.save_state()).startswith(str(tmp_path))


@pytest.mark.parametrize("name", REFUSED)
def test_attributes_read_only_by_the_constructor_cannot_be_assigned(
    accelerator: Accelerator, name: str
) -> None:
    with pytest.raises(AttributeError):
        setattr(accelerator, name, object())


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("cpu", r"pass it to Accelerator\(cpu=...\)"),
        ("ddp_handler", "pass it in kwargs_handlers"),
        ("deepspeed_plugin", r"pass it to Accelerator\(deepspeed_plugin=...\)"),
        ("fp8_enabled", "it follows from the arguments of Accelerator"),
    ],
)
def test_assignment_error_says_what_to_do_instead(
    accelerator: Accelerator, name: str, way_out: str
) -> None:
    with pytest.raises(AssignmentError, match=f"{name} cannot be replaced: {way_out}"):
        setattr(accelerator, name, object())


@pytest.mark.parametrize(
    ("name", "value"),
    [("dataloader_config", None), ("device_placement", "no"), ("rng_types", ["nonsense"])],
)
def test_assigning_a_value_of_the_wrong_type_is_refused(
    accelerator: Accelerator, name: str, value: Any
) -> None:
    with pytest.raises(ConfigurationError):
        setattr(accelerator, name, value)


#: Prints the names that a state accepted. A separate process, because the drop-in changes the rules.
_ASSIGN_TO_STATES = """
import sys
from accelerate_core import Accelerator, PartialState
from accelerate_core.errors import AssignmentError
from accelerate_core.state import AcceleratorState

accelerator = Accelerator(cpu=True)
for state in (accelerator.state, AcceleratorState(), PartialState()):
    for name in sys.argv[1:]:
        try:
            setattr(state, name, object())
        except AssignmentError as error:
            assert f"{name} cannot be assigned" in str(error)
        else:
            print(name)
accelerator.state.fsdp_plugin = None  # the current value
"""


def test_state_attributes_cannot_be_assigned() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ASSIGN_TO_STATES, *OF_STATE],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_assigning_the_current_value_is_accepted(accelerator: Accelerator) -> None:
    accelerator.deepspeed_plugin = None
    accelerator.scaler = accelerator.scaler
    accelerator.ddp_handler = None


def test_scripts_can_add_their_own_attributes(accelerator: Accelerator) -> None:
    for value in (1, 2):
        accelerator.mine = value
        assert accelerator.mine == value
