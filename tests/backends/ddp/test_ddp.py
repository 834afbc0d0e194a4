"""The settings of DDP: their effect on two ranks, and their sources."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import case_names, check_case, run_workers

from accelerate_core import Accelerator
from accelerate_core.errors import ConfigurationError
from accelerate_ddp import DDPCommunicationHookType, DistributedDataParallelKwargs

WORKER = Path(__file__).with_name("ddp_worker.py")
VARIABLE = "ACCELERATE_DDP_FIND_UNUSED_PARAMETERS"


@pytest.fixture(scope="module")
def run():
    return run_workers(WORKER, 2, timeout=150)


@pytest.mark.dist
@pytest.mark.parametrize("case", case_names(WORKER))
def test_case(run, case):
    check_case(run, case)


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("mixed_precision: 'no'\nddp_config:\n  find_unused_parameters: true\n")
    return path


@pytest.mark.dist
@pytest.mark.parametrize("source", ["environment", "file"])
def test_environment_and_config_file_configure_a_run(source, config):
    env = {VARIABLE: "true", "EXPECTED_ORIGIN": VARIABLE}
    if source == "file":
        env = {"ACCELERATE_CONFIG_FILE": str(config), "EXPECTED_ORIGIN": f"{config} line 3"}
    name = "settings_come_from_outside_the_script"
    run = run_workers(WORKER, 2, [name], timeout=100, env=env)
    check_case(run, name)


# --- one process: precedence and errors ------------------------------------------------------------


def settings_of(**arguments) -> tuple[DistributedDataParallelKwargs, str]:
    with Accelerator(cpu=True, backend="ddp", **arguments) as accelerator:
        (line,) = [s for s in accelerator.explain().splitlines() if "find_unused" in s]
        return accelerator.ddp_handler, line


def test_constructor_wins_over_environment_and_environment_over_file(monkeypatch, config):
    assert settings_of()[0].find_unused_parameters is False
    monkeypatch.setenv("ACCELERATE_CONFIG_FILE", str(config))
    handler, line = settings_of()
    assert handler.find_unused_parameters is True
    assert f"{config} line 3" in line
    monkeypatch.setenv(VARIABLE, "no")
    handler, line = settings_of()
    assert handler.find_unused_parameters is False
    assert VARIABLE in line
    given = DistributedDataParallelKwargs(find_unused_parameters=True)
    handler, line = settings_of(kwargs_handlers=[given])
    assert handler.find_unused_parameters is True
    assert "constructor" in line


def test_fields_not_set_by_a_handler_come_from_the_environment(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    handler, _ = settings_of(kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=3)])
    assert (handler.bucket_cap_mb, handler.find_unused_parameters) == (3, True)


@pytest.mark.parametrize(
    ("variable", "value", "parts"),
    [
        (VARIABLE, "maybe", [VARIABLE, "'maybe'", "find_unused_parameters", "true"]),
        ("ACCELERATE_DDP_BUCKET_CAP_MB", "0", ["ACCELERATE_DDP_BUCKET_CAP_MB", "at least 1"]),
        ("ACCELERATE_DDP_COMM_HOOK", "fp61", ["ACCELERATE_DDP_COMM_HOOK", "'fp61'", "'fp16'"]),
    ],
)
def test_error_names_the_invalid_variable(monkeypatch, variable, value, parts):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError) as caught:
        settings_of()
    assert [part for part in parts if part not in str(caught.value)] == [], caught.value


def test_error_names_the_line_of_an_invalid_value_in_a_file(monkeypatch, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("ddp_config:\n  bucket_cap_mb: 25\n  comm_hook: fp61\n")
    monkeypatch.setenv("ACCELERATE_CONFIG_FILE", str(path))
    with pytest.raises(ConfigurationError) as caught:
        settings_of()
    for part in ("comm_hook", "fp61", f"{path} line 3", "fp16"):
        assert part in str(caught.value)


def test_error_names_the_invalid_field_of_a_handler():
    with pytest.raises(ConfigurationError, match=r"find_unused_parameter'.*Did you mean"):
        DistributedDataParallelKwargs(find_unused_parameter=True)
    with pytest.raises(ConfigurationError, match=r"comm_hook='fp61'.*'fp16'"):
        DistributedDataParallelKwargs(comm_hook="fp61")
    with pytest.raises(ConfigurationError, match="comm_wrapper=power_sgd is not a compression"):
        DistributedDataParallelKwargs(comm_wrapper="power_sgd")


def test_handler_converts_and_reports_its_values():
    handler = DistributedDataParallelKwargs(comm_hook="fp16", bucket_cap_mb=5)
    assert handler.comm_hook is DDPCommunicationHookType.FP16
    assert handler.to_kwargs() == {"comm_hook": DDPCommunicationHookType.FP16, "bucket_cap_mb": 5}
    from accelerate_core import DistributedDataParallelKwargs as exported

    assert exported is DistributedDataParallelKwargs


def test_one_process_does_not_wrap_the_model():
    with Accelerator(cpu=True, backend="ddp") as accelerator:
        net = torch.nn.Linear(2, 2)
        assert accelerator.prepare(net) is net
        assert accelerator.distributed_type.value == "NO"
