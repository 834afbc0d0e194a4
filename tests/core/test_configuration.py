"""Sources of a value, their precedence, and the behaviour of settings objects."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import re
from datetime import timedelta
from pathlib import Path

import dummies
import pytest

from accelerate_core import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    LoggerType,
    PrecisionType,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accelerate_core.config.files import read_config
from accelerate_core.config.lookup import Sources, resolve_settings
from accelerate_core.errors import ConfigurationError


def test_source_with_the_highest_precedence_wins_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "gradient_accumulation_steps"
    steps = lambda **arguments: str(Accelerator(**arguments).provenance[name])  # noqa: E731
    assert steps() == "1 (default)"
    config = tmp_path / "config.yaml"
    config.write_text("debug: false\ngradient_accumulation_steps: 2\n")
    monkeypatch.setenv("ACCELERATE_CONFIG_FILE", str(config))
    assert steps() == f"2 ({config} line 2)"
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    assert steps() == "3 (environment variable ACCELERATE_GRADIENT_ACCUMULATION_STEPS)"
    provenance = json.dumps(
        {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "command line --gradient_accumulation_steps"}
    )
    monkeypatch.setenv("ACCELERATE_PROVENANCE", provenance)
    assert steps() == "3 (command line --gradient_accumulation_steps)"
    assert (
        steps(gradient_accumulation_steps=4)
        == "4 (constructor argument gradient_accumulation_steps)"
    )
    plugin = GradientAccumulationPlugin(num_steps=5)
    assert steps(gradient_accumulation_plugin=plugin).startswith("5 (constructor argument")


def test_backend_defaults_override_only_the_cores_defaults(tmp_path: Path) -> None:
    extra = "    def core_defaults(self): return {'gradient_accumulation_steps': 6}\n"
    dummies.backend(tmp_path, "engine", extra=extra)
    code = """
    from accelerate_core import Accelerator
    name = "gradient_accumulation_steps"
    out([str(Accelerator(backend="engine").provenance[name]),
         str(Accelerator(backend="engine", gradient_accumulation_steps=1).provenance[name])])
    """
    detected, given = dummies.run(tmp_path, code)
    assert detected == "6 (backend engine)"
    assert given == "1 (constructor argument gradient_accumulation_steps)"


def test_deprecated_names_keep_their_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USE_FP16", "yes")
    assert Accelerator().mixed_precision == "fp16"
    monkeypatch.setenv("USE_FP16", "no")
    assert Accelerator().mixed_precision == "no"


def test_settings_objects_behave_like_dataclasses() -> None:
    config = ProjectConfiguration("runs", automatic_checkpoint_naming=True)
    assert config.logging_dir == "runs"
    assert dataclasses.replace(config, total_limit=2).total_limit == 2
    assert dataclasses.asdict(DataLoaderConfiguration())["even_batches"] is True
    assert InitProcessGroupKwargs(timeout=30).timeout == timedelta(seconds=30)
    assert InitProcessGroupKwargs(backend="gloo").to_kwargs() == {"backend": "gloo"}


def test_other_sources_only_fill_fields_that_were_not_passed(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("dynamo_config:\n  mode: max-autotune\n  fullgraph: true\n")
    environ = {"ACCELERATE_DYNAMO_BACKEND": "eager", "ACCELERATE_DYNAMO_USE_FULLGRAPH": "no"}
    given = TorchDynamoPlugin(mode="default")
    made, provenance = resolve_settings(
        TorchDynamoPlugin, given, Sources(environ, read_config(path))
    )
    assert (made.backend, made.mode, made.fullgraph, made.dynamic) == (
        "eager",
        "default",
        False,
        None,
    )
    assert provenance["mode"].origin == "constructor argument dynamo_plugin"
    assert provenance["fullgraph"].origin == "environment variable ACCELERATE_DYNAMO_USE_FULLGRAPH"
    assert provenance["dynamic"].origin == "default"
    assert given.backend is None


def test_enumerations_accept_unknown_names() -> None:
    accelerator = Accelerator()
    assert accelerator.distributed_type == DistributedType.NO == "NO"
    assert accelerator.distributed_type != DistributedType.SOMETHING_NEW
    assert DistributedType.SOMETHING_NEW not in DistributedType
    assert "bf16" in PrecisionType
    assert [str(kind) for kind in PrecisionType][:2] == ["no", "fp16"]
    assert LoggerType.ALL == "all"
    assert LoggerType("ALL").value == "all"
    with pytest.raises(AttributeError):
        DistributedType.lower_case_is_no_member  # noqa: B018


def test_enumerations_print_like_those_of_accelerate() -> None:
    kind = DistributedType.MULTI_CPU
    assert (str(kind), f"{kind}") == ("DistributedType.MULTI_CPU",) * 2
    assert f"{DistributedType.NO:>20}" == "  DistributedType.NO"
    assert repr(kind) == "<DistributedType.MULTI_CPU: 'MULTI_CPU'>"
    assert json.dumps([kind]) == '["MULTI_CPU"]'
    assert (type(kind.value), kind.value, kind.name) == (str, "MULTI_CPU", "MULTI_CPU")
    assert DistributedType(kind) is kind is DistributedType("multi_cpu")
    assert DistributedType.NO in DistributedType
    for same in (copy.deepcopy(kind), pickle.loads(pickle.dumps(kind))):
        assert same == kind == "MULTI_CPU"
    assert (str(PrecisionType.FP16), f"{PrecisionType.FP16}") == ("fp16", "fp16")
    assert "Distributed environment: DistributedType.NO\n" in repr(Accelerator(cpu=True).state)


def test_environment_is_read_but_never_written() -> None:
    before = dict(os.environ)
    Accelerator(mixed_precision="bf16", gradient_accumulation_steps=3, dynamo_backend="eager")
    assert dict(os.environ) == before


def test_mistakes_in_plugin_sections_are_reported_together_with_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(
        "mixed_precision: fp8\n"
        "gradient_accumulation_steps: 0\n"
        "distributed_type: FSDP\n"
        "fsdp_config:\n"
        "  fsdp_cpu_offload: maybe\n"
        "fp8_config:\n"
        "  backend: TE\n"
        "  amax_history_len: many\n"
        "dynamo_config:\n"
        "  dynamo_mode: fastest\n"
    )
    monkeypatch.setenv("ACCELERATE_CONFIG_FILE", str(file))
    marks = [
        *("gradient_accumulation_steps: 0", "fsdp_cpu_offload: 'maybe'"),
        *("fp8_config.amax_history_len: 'many'", "dynamo_mode: 'fastest'"),
    ]
    with pytest.raises(ConfigurationError, match="4 mistakes") as failure:
        Accelerator(cpu=True)
    assert [mark for mark in marks if mark not in str(failure.value)] == []
    # Without a mistake in the core settings, the first section that is read reports the others.
    file.write_text(re.sub("gradient.*\n", "", file.read_text()))
    with pytest.raises(ConfigurationError, match="3 mistakes") as failure:
        Accelerator(cpu=True)
    assert [mark for mark in marks[1:] if mark not in str(failure.value)] == []
