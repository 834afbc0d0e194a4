"""Errors report the invalid value once, with its source, the allowed values and a suggestion."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import accelerate_core
from accelerate_core import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    KwargsHandler,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accelerate_core.contract.topology import Topology, read_topology
from accelerate_core.errors import (
    AccelerateError,
    CheckpointError,
    ConfigurationError,
    MissingPluginError,
    UnknownArgumentError,
)
from accelerate_core.plugins import catalog, discovery, selection
from accelerate_core.plugins.selection import Request, select


class Foreign(KwargsHandler): ...


@pytest.fixture(autouse=True)
def _names_of_a_planned_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a package to the catalogue that has not been released yet."""
    monkeypatch.setitem(catalog.ARGUMENTS, "warp_plugin", "warp")
    monkeypatch.setitem(catalog.VARIABLES, "ACCELERATE_USE_WARP", "warp")
    monkeypatch.setitem(catalog.NAMES["precision"], "fp4", "warp")
    monkeypatch.setitem(catalog.NAMES["backend"], "warp", "warp")
    monkeypatch.setitem(catalog.EXPORTS, "start_warp", "warp")


CONSTRUCTOR: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "steps not a whole number": (
        {"gradient_accumulation_steps": 2.5},
        ConfigurationError,
        ["gradient_accumulation_steps=2.5", "must be a whole number"],
    ),
    "a plugin of the wrong class": (
        {"dynamo_plugin": 3},
        ConfigurationError,
        ["dynamo_plugin", "takes a TorchDynamoPlugin, not int"],
    ),
    "an accumulation plugin of the wrong class": (
        {"gradient_accumulation_plugin": 3},
        ConfigurationError,
        ["takes a GradientAccumulationPlugin"],
    ),
    "a boolean as a word": (
        {"device_placement": "no"},
        ConfigurationError,
        ["device_placement", "True or False", "'no'"],
    ),
    "an unknown generator": (
        {"rng_types": ["generater"]},
        ConfigurationError,
        ["'generater'", "Did you mean 'generator'?"],
    ),
    "timeout too long": (
        {"process_group_timeout": 1e300},
        ConfigurationError,
        ["process_group_timeout", "at most 1e+09"],
    ),
    "timeout below one": (
        {"process_group_timeout": -1},
        ConfigurationError,
        ["process_group_timeout", "at least 1"],
    ),
    "project directory of the wrong type": (
        {"project_dir": 3},
        ConfigurationError,
        ["takes a path"],
    ),
    "unknown argument": ({"colour": 1}, UnknownArgumentError, ["no argument 'colour'"]),
    "misspelt argument": (
        {"kwarg_handler": []},
        UnknownArgumentError,
        ["Did you mean 'kwargs_handlers'?"],
    ),
    "unknown backend": (
        {"backend": "dpd"},
        MissingPluginError,
        ["'dpd'", "constructor argument backend", "'ddp'"],
    ),
    "backend of the wrong type": ({"backend": 3}, ConfigurationError, ["backend=3"]),
    "backend not installed": (
        {"backend": "warp"},
        MissingPluginError,
        ['pip install "accelerate-core[warp]"'],
    ),
    "argument of a missing plugin": (
        {"warp_plugin": object()},
        MissingPluginError,
        ["warp_plugin", 'pip install "accelerate-core[warp]"'],
    ),
    "precision": (
        {"mixed_precision": "bf61"},
        ConfigurationError,
        ["'bf61'", "constructor argument", "'fp16'", "'bf16'?"],
    ),
    "precision not installed": (
        {"mixed_precision": "fp4"},
        MissingPluginError,
        ['pip install "accelerate-core[warp]"'],
    ),
    "steps below one": (
        {"gradient_accumulation_steps": 0},
        ConfigurationError,
        ["=0", "at least 1"],
    ),
    "steps not a number": (
        {"gradient_accumulation_steps": "two"},
        ConfigurationError,
        ["'two'", "whole number"],
    ),
    "steps twice": (
        {
            "gradient_accumulation_steps": 2,
            "gradient_accumulation_plugin": GradientAccumulationPlugin(4),
        },
        ConfigurationError,
        ["not both"],
    ),
    "compiler twice": (
        {"dynamo_backend": "eager", "dynamo_plugin": TorchDynamoPlugin()},
        ConfigurationError,
        ["not both"],
    ),
    "loader settings twice": (
        {"split_batches": True, "dataloader_config": DataLoaderConfiguration()},
        ConfigurationError,
        ["dataloader_config"],
    ),
    "loader settings of the wrong type": (
        {"dataloader_config": {}},
        ConfigurationError,
        ["not dict"],
    ),
    "handler twice": (
        {"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]},
        ConfigurationError,
        ["two AutocastKwargs"],
    ),
    "settings among handlers": (
        {"kwargs_handlers": [ProjectConfiguration(project_dir="x")]},
        ConfigurationError,
        ["ProjectConfiguration"],
    ),
    "handler class": ({"kwargs_handlers": [AutocastKwargs]}, ConfigurationError, ["instances"]),
    "handler that no plugin takes": (
        {"kwargs_handlers": [Foreign()]},
        ConfigurationError,
        ["Foreign", "AutocastKwargs", "GradScalerKwargs"],
    ),
    "tracker unknown": (
        {"log_with": "wandv"},
        MissingPluginError,
        ["'wandv'", "log_with", "'wandb'"],
    ),
    "tracker of the wrong type": ({"log_with": 3}, TypeError, ["int"]),
}


@pytest.mark.parametrize(("arguments", "kind", "expected"), CONSTRUCTOR.values(), ids=CONSTRUCTOR)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_errors_for_invalid_constructor_arguments(
    arguments: dict[str, Any], kind: type[Exception], expected: list[str]
) -> None:
    with pytest.raises(kind) as failure:
        Accelerator(**arguments)
    for part in expected:
        assert part in str(failure.value)
    if kind is MissingPluginError:
        assert not hasattr(failure.value, "__notes__"), (
            "the error should not name an installed plugin"
        )


OWN = ("accelerate-core", "accelerate-tracking")


def test_error_for_a_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = discovery.installed()
    plugins = tuple(one for one in found.plugins if one.distribution in OWN)
    without = dataclasses.replace(found, plugins=plugins)
    for module in (discovery, selection):
        monkeypatch.setattr(module, "installed", lambda: without)
    with pytest.raises(MissingPluginError, match=r'pip install "accelerate-core\[mlflow\]"'):
        Accelerator(log_with="mlflow")


ENVIRONMENT: dict[str, tuple[dict[str, str], list[str]]] = {
    "precision": (
        {"ACCELERATE_MIXED_PRECISION": "fp61"},
        ["environment variable ACCELERATE_MIXED_PRECISION", "'fp61'", "Did you mean 'fp16'?"],
    ),
    "precision from the launcher": (
        {
            "ACCELERATE_MIXED_PRECISION": "fp61",
            "ACCELERATE_PROVENANCE": '{"ACCELERATE_MIXED_PRECISION": "command line --mixed_precision"}',
        },
        ["requested by command line --mixed_precision"],
    ),
    "steps": (
        {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "two"},
        ["environment variable ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "'two'"],
    ),
    "switch": ({"ACCELERATE_USE_CPU": "maybe"}, ["ACCELERATE_USE_CPU", "'maybe'", "'true'"]),
    "backend": (
        {"ACCELERATE_BACKEND": "dpd"},
        ["environment variable ACCELERATE_BACKEND", "'ddp'"],
    ),
    "variable of a missing plugin": (
        {"ACCELERATE_USE_WARP": "true"},
        ["ACCELERATE_USE_WARP", 'pip install "accelerate-core[warp]"'],
    ),
    "field of a settings class": (
        {"ACCELERATE_DYNAMO_MODE": "fast"},
        ["'fast'", "ACCELERATE_DYNAMO_MODE"],
    ),
    "config file missing": ({"ACCELERATE_CONFIG_FILE": "nowhere.yaml"}, ["nowhere.yaml"]),
}


@pytest.mark.parametrize(("variables", "expected"), ENVIRONMENT.values(), ids=ENVIRONMENT)
def test_errors_for_invalid_environment_variables(
    variables: dict[str, str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(AccelerateError) as failure:
        Accelerator()
    for part in expected:
        assert part in str(failure.value)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5 is outside a world of WORLD_SIZE=2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' must be a number"),
        ({"PMI_RANK": "3", "PMI_SIZE": "3"}, "PMI_RANK=3 is outside"),
    ],
)
def test_errors_for_invalid_rank_variables(variables: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        read_topology(variables)


def test_error_for_several_processes_without_a_distributed_backend() -> None:
    request = Request({}, {"ACCELERATE_DISABLED_PLUGINS": "ddp"}, Topology(0, 2, source="a test"))
    with pytest.raises(MissingPluginError, match=re.escape('pip install "accelerate-core[ddp]"')):
        select("backend", request).or_raise()


def test_misspelt_variable_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISON", "bf16")
    with pytest.warns(UserWarning, match="Did you mean 'ACCELERATE_MIXED_PRECISION'"):
        assert Accelerator().mixed_precision == "no"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mixed_precision: bf61\n", ["line 1", "'bf61'"]),
        ("debug: false\n\ngradient_accumulation_steps: -1\n", ["line 3", "at least 1"]),
        ("- a\n- b\n", ["mapping", "list"]),
        ("a: [1\n", ["not valid YAML"]),
    ],
)
def test_errors_for_an_invalid_config_file(
    text: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    monkeypatch.setenv("ACCELERATE_CONFIG_FILE", str(path))
    with pytest.raises(ConfigurationError) as failure:
        Accelerator()
    for part in ["config.yaml", *expected]:
        assert part in str(failure.value)


SETTINGS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "unknown field": (
        lambda: GradScalerKwargs(init_scal=1),
        ["'init_scal'", "Did you mean 'init_scale'?"],
    ),
    "wrong type": (
        lambda: GradScalerKwargs(growth_interval="x"),
        ["growth_interval='x'", "integer"],
    ),
    "out of range": (
        lambda: GradScalerKwargs(backoff_factor=2),
        ["backoff_factor=2", "less than 1"],
    ),
    "wrong mode": (lambda: TorchDynamoPlugin(mode="fast"), ["'fast'", "reduce-overhead"]),
    "limit below one": (lambda: ProjectConfiguration(total_limit=0), ["total_limit=0"]),
}


@pytest.mark.parametrize(("make", "expected"), SETTINGS.values(), ids=SETTINGS)
def test_errors_for_invalid_settings(make: Callable[[], Any], expected: list[str]) -> None:
    with pytest.raises(ConfigurationError) as failure:
        make()
    for part in expected:
        assert part in str(failure.value)


def test_errors_for_unknown_names() -> None:
    with pytest.raises(AttributeError, match="Did you mean 'Accelerator'"):
        accelerate_core.Acelerator  # noqa: B018
    with pytest.raises(ImportError, match=re.escape('pip install "accelerate-core[warp]"')):
        from accelerate_core import start_warp  # noqa: F401
    with pytest.raises(AttributeError, match="Did you mean 'mixed_precision'"):
        Accelerator().mixed_precison  # noqa: B018


def test_errors_for_invalid_method_arguments() -> None:
    accelerator = Accelerator()
    with pytest.raises(AccelerateError, match="device_placement has 1 entries for 2"):
        accelerator.prepare(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), device_placement=[True])
    with pytest.raises(ConfigurationError, match=r"index 0 \(int\), .* 1 \(list\)") as failure:
        accelerator.register_for_checkpointing(3, [])
    assert "state_dict" in str(failure.value)


def test_errors_for_invalid_checkpoints(tmp_path: Path) -> None:
    accelerator = Accelerator()
    model = torch.nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match=r"save_state\(\) got no directory") as failure:
        accelerator.save_state()
    # The message shows two complete solutions, and neither leads to another error.
    assert 'save_state("checkpoints/step_100")' in str(failure.value)
    shown = "ProjectConfiguration('runs', automatic_checkpoint_naming=True)"
    assert f"Accelerator(project_config={shown})" in str(failure.value)
    with pytest.raises(CheckpointError, match="no checkpoint directory"):
        accelerator.load_state(tmp_path / "nothing")
    accelerator.save_state(tmp_path / "state")
    whole = (tmp_path / "state" / "model.safetensors").read_bytes()
    (tmp_path / "state" / "model.safetensors").write_bytes(whole[:40])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        accelerator.load_state(tmp_path / "state")
    (tmp_path / "state" / "model.safetensors").write_bytes(whole)
    (tmp_path / "state" / "optimizer.bin").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.bin is missing"):
        accelerator.load_state(tmp_path / "state")


def test_several_mistakes_in_a_file_are_reported_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "gradient_accumulation_steps: two\ndebug: perhaps\ndynamo_config:\n  mode: fast\n"
    )
    monkeypatch.setenv("ACCELERATE_CONFIG_FILE", str(config))
    with pytest.raises(ConfigurationError, match="There are 3 mistakes") as failure:
        Accelerator(cpu=True)
    lines = [int(line) for line in re.findall(r"config.yaml line (\d+)", str(failure.value))]
    assert sorted(lines) == [1, 2, 4]


def test_unknown_names_of_plugins_are_reported_with_the_other_mistakes_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "mixed_precision: bf17\ngradient_accumulation_steps: 0\nbackend: ddpp\n"
        "checkpointer: directroy\ntracking: queud\ndynamo_config:\n  mode: fast\n"
    )
    monkeypatch.setenv("ACCELERATE_CONFIG_FILE", str(config))
    with pytest.raises(ConfigurationError, match="There are 6 mistakes") as failure:
        Accelerator(cpu=True)
    message = str(failure.value)
    lines = [int(line) for line in re.findall(r"config.yaml line (\d+)", message)]
    assert sorted(lines) == [1, 2, 3, 4, 5, 7]
    for meant in ("bf16", "ddp", "directory", "queued"):
        assert f"Did you mean {meant!r}?" in message


def test_mistakes_in_arguments_are_reported_together() -> None:
    wrong: dict[str, Any] = {
        "mixed_precision": "bf17",
        "backend": "ddpp",
        "gradient_acumulation_steps": 2,
        "device_placment": True,
        "step_scheduler_with_optimizer": "yes",
    }
    with pytest.raises(ConfigurationError, match="There are 5 mistakes") as failure:
        Accelerator(cpu=True, **wrong)
    message = str(failure.value)
    for meant in ("bf16", "ddp", "gradient_accumulation_steps", "device_placement"):
        assert f"Did you mean {meant!r}?" in message
    assert "step_scheduler_with_optimizer" in message


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"gradient_acumulation_steps": 2}, UnknownArgumentError),
        ({"backend": "ddpp"}, MissingPluginError),
        ({"checkpointer": "directroy"}, MissingPluginError),
        ({"mixed_precision": "bf17"}, ConfigurationError),
    ],
)
def test_single_mistake_keeps_its_exception_type(
    wrong: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind) as failure:
        Accelerator(cpu=True, **wrong)
    assert type(failure.value) is kind


def test_single_mistake_in_a_file_is_reported_without_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("gradient_accumulation_steps: two\n")
    monkeypatch.setenv("ACCELERATE_CONFIG_FILE", str(config))
    with pytest.raises(ConfigurationError, match=r"^gradient_accumulation_steps: 'two' \("):
        Accelerator(cpu=True)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"backend": "wapr"}, "Did you mean 'warp'? It is not installed; install it with: pip"),
        (
            {"wrap_plugin": 1},
            "Did you mean 'warp_plugin'? It is not installed; install it with: pip",
        ),
        (
            {"mixed_precision": "pf4"},
            "Did you mean 'fp4'? It is not installed; install it with: pip",
        ),
    ],
)
def test_misspelt_name_of_a_missing_plugin_is_one_error(
    arguments: dict[str, Any], expected: str
) -> None:
    with pytest.raises(AccelerateError) as failure:
        Accelerator(**arguments)
    assert expected in str(failure.value)


def test_suggestion_is_the_name_of_the_plugin_not_an_alias(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`fsdp` is an alias of the package whose plugin is called `fsdp2`."""
    with pytest.raises(MissingPluginError, match="Did you mean 'fsdp2'") as failure:
        Accelerator(backend="fdsp")
    assert "'fsdp'" not in str(failure.value)


def test_importing_a_misspelt_name_suggests_the_right_one() -> None:
    with pytest.raises(ImportError, match="Did you mean 'Accelerator'"):
        exec("from accelerate_core import Acelerator")
    assert not hasattr(accelerate_core, "Acelerator")


def test_error_for_a_non_scalar_loss_shows_its_shape() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    outputs = model(torch.ones(3, 2))
    with pytest.raises(ConfigurationError, match=r"shape \(3, 1\)"):
        accelerator.backward(outputs)
    accelerator.backward(
        model(torch.ones(3, 2)), gradient=torch.ones(3, 1)
    )  # torch also accepts this


def test_error_for_a_loss_that_is_not_a_tensor_names_its_type() -> None:
    with pytest.raises(ConfigurationError, match=r"backward\(loss=3\)"):
        Accelerator(cpu=True).backward(3)
