"""The helpers of `accelerate.test_utils`, and private members that tests of other libraries use."""

from __future__ import annotations

import os
import subprocess
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from accelerate_big_model.dispatch import dispatch_model
from accelerate_big_model.loading import load_checkpoint_in_model
from accelerate_big_model.tensors import check_device_map
from accelerate_core import (
    Accelerator,
    AcceleratorState,
    DataLoaderConfiguration,
    DistributedType,
    GradientState,
    PartialState,
)
from accelerate_core.distributed.collectives import CannotPadNestedTensorWarning
from accelerate_core.errors import ConfigurationError
from accelerate_drop_in import (
    environment,
    models,
    other,
    private,  # noqa: F401
    settings,
    trees,
    verbs,
)
from accelerate_drop_in.accelerator import Accelerator as DropIn
from accelerate_drop_in.by_hand import DataLoaderDispatcher
from accelerate_drop_in.commands import config, parsers
from accelerate_drop_in.commands.to_fsdp2 import convert_config_to_fsdp2
from accelerate_drop_in.testing import helpers
from accelerate_drop_in.testing.training import RegressionDataset, RegressionModel


@pytest.fixture(autouse=True)
def _end() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(True)  # type: ignore[attr-defined]


def test_scripts_of_test_utils_pass_on_two_ranks() -> None:
    run = support.run_workers(Path(__file__).with_name("served_scripts_worker.py"), 2).checked()
    assert len(run.results[0]) == 5
    assert run.results[0] == run.results[1]


def test_reset_state_is_created_again() -> None:
    state: Any = PartialState
    state._reset_state()
    assert state._shared_state == {}
    PartialState(cpu=True)
    assert state._shared_state
    assert AcceleratorState._shared_state == {} == GradientState._shared_state  # type: ignore[attr-defined]
    accelerator: Any = Accelerator(cpu=True, mixed_precision="bf16")
    assert AcceleratorState._shared_state  # type: ignore[attr-defined]
    accelerator.gradient_state._set_sync_gradients(False)
    assert not accelerator.sync_gradients
    accelerator.state._reset_state()
    assert state._shared_state
    AcceleratorState._reset_state(True)  # type: ignore[attr-defined]
    assert state._shared_state == {}
    assert Accelerator(cpu=True).mixed_precision == "no"


def test_prepared_objects_are_in_accelerates_private_lists() -> None:
    accelerator: Any = Accelerator(cpu=True)
    model = RegressionModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(RegressionDataset(length=4), batch_size=2)
    made = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(model)
    assert accelerator._models == [made[0]]
    assert accelerator._optimizers == [made[1]]
    assert accelerator._schedulers == []
    assert accelerator._dataloaders == [made[2]]
    assert accelerator._custom_objects == [model]


def test_require_decorators_skip_and_name_the_requirement() -> None:
    for name, there in (("cpu", not torch.accelerator.is_available()), ("mlu", False)):
        require = getattr(helpers, f"require_{name}")

        class Case(unittest.TestCase):
            @require
            def test(self) -> None:
                pass

        result = unittest.TestResult()
        Case("test").run(result)
        assert [said for _, said in result.skipped] == [] if there else [f"needs {name}"]
    with pytest.raises(AttributeError, match="Did you mean 'require_cuda'"):
        helpers.require_cudaa  # noqa: B018


def test_command_helpers_return_output_and_raise_on_failure() -> None:
    assert helpers.run_command(["echo", Path("x")], return_stdout=True) == "x\n"
    with pytest.raises(helpers.SubprocessCallException, match="status 3:\n\nno"):
        helpers.run_command(["sh", "-c", "echo no >&2; exit 3"])
    done = helpers.execute_subprocess_async(["sh", "-c", "echo a; echo b >&2"], quiet=True)
    assert (done.stdout, done.stderr) == (["a"], ["b"])
    with pytest.raises(RuntimeError, match="failed with status -9"):
        helpers.execute_subprocess_async(["sleep", "60"], timeout=0.2)
    assert helpers.get_launch_command(cpu=True, num_processes=2, fsdp=False) == [
        *("accelerate", "launch", "--cpu", "--num_processes=2")
    ]
    with helpers.assert_exception(ValueError, "bad"):
        raise ValueError("bad value")
    expected = helpers.assert_exception(ValueError, "good")
    with pytest.raises(AssertionError, match="Expected ValueError"), expected:
        raise ValueError("bad value")
    assert helpers.capture_call_output(print, 1) == "1\n"


def test_prepared_objects_have_the_classes_that_libraries_check(tmp_path: Path) -> None:
    stateful = DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=True)
    accelerator: Any = DropIn(cpu=True, dataloader_config=stateful)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    data = DataLoader(RegressionDataset(length=4), batch_size=2)
    made = accelerator.prepare(model, optimizer, scheduler, data)
    assert all(one._is_accelerate_prepared for one in made)
    assert isinstance(made[3], StatefulDataLoader)
    assert isinstance(made[3], DataLoaderDispatcher)
    assert made[3].use_stateful_dataloader
    assert len(list(made[3])) == 2
    assert accelerator.prepare(made[3]) is made[3]
    made[1]._is_overflow = True
    made[2].step()
    assert made[1].step_was_skipped
    assert made[2].get_last_lr() == [0.1]

    contained = torch.compile(torch.nn.DataParallel(model))
    assert accelerator.unwrap_model(contained)._orig_mod is model
    assert accelerator.unwrap_model(contained, keep_torch_compile=False) is model

    quantized: Any = torch.nn.Linear(1, 1)
    quantized.is_loaded_in_8bit, quantized.hf_device_map = True, {"": "cpu"}
    with pytest.raises(ConfigurationError, match="CPU or disk offload"):
        accelerator.prepare(quantized)

    big = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    whole = {name: value.clone() for name, value in big.state_dict().items()}
    dispatch_model(big, {"0": "cpu", "1": "disk"}, main_device="cpu", offload_dir=tmp_path / "o")
    accelerator.save_model(big, tmp_path / "saved")
    again = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    load_checkpoint_in_model(again, tmp_path / "saved")
    assert all(torch.equal(value, whole[name]) for name, value in again.state_dict().items())


def test_settings_read_environment_variables_when_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    made = settings.ParallelismConfig(1, cp_size=2)
    assert made._get_mesh() == (("dp_shard", "cp"), (2, 2))
    assert made.cp_handler.cp_comm_strategy == "alltoall"
    assert settings.ParallelismConfig(dp_shard_size=1)._get_mesh() == ()
    assert settings.TorchDynamoPlugin(mode="default").backend == "eager"
    assert settings.TorchDynamoPlugin(backend="inductor").backend == "inductor"


def test_utilities_accept_what_accelerates_accept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @environment.purge_accelerate_environment
    class Base:
        pass

    class Below(Base):
        def test(self) -> None:
            os.environ["ACCELERATE_LEFT"] = "1"

    monkeypatch.delenv("ACCELERATE_LEFT", raising=False)
    Below().test()
    assert "ACCELERATE_LEFT" not in os.environ

    assert trees.concatenate(["one"]) == "one"
    nested = torch.nested.nested_tensor([[1.0, 2.0], [1.0]])
    with pytest.warns(CannotPadNestedTensorWarning):
        assert verbs.pad_across_processes(nested) is nested

    weight = torch.ones(2)
    other.save({"a": weight, "b": weight}, tmp_path / "w.safetensors", safe_serialization=True)
    assert "Removed shared tensor(s) 'b' from" in caplog.text

    model: Any = RegressionModel()
    model._original_forward = model.forward
    model.forward = models.convert_outputs_to_fp32(model.forward)
    assert "forward" not in vars(models.extract_model_from_parallel(model, False))

    with pytest.warns(UserWarning, match="do not match any submodules: 'no'"):
        check_device_map(torch.nn.Linear(1, 1), {"": "cpu", "no": 0})


def test_command_parsers_and_functions_work_for_programs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print('ran', *sys.argv[1:]); sys.exit(len(sys.argv) - 2)")
    parser = parsers.launch_command_parser()
    args = parser.parse_args(["--cpu", "--num-processes", "1", str(script), "--lr"])
    assert (args.cpu, args.multi_gpu, args.num_processes) == (True, False, 1)
    assert (args.training_script, args.training_script_args) == (str(script), ("--lr",))
    parsers.launch_command(args)  # returns when the script has ended
    assert "ran --lr" in capfd.readouterr().out
    with pytest.raises(subprocess.CalledProcessError):
        parsers.launch_command(parser.parse_args(["--cpu", str(script), "a", "b"]))
    with pytest.raises(SystemExit):
        parser.parse_args(["--num_processes", "many", str(script)])
    assert "--num_processes" in parser.format_help()

    made = config.ClusterConfig(num_processes=2, distributed_type=DistributedType.NO)
    made.to_yaml_file(str(tmp_path / "c.yaml"))
    read = config.load_config_from_file(str(tmp_path / "c.yaml"))
    assert isinstance(read, config.BaseConfig)
    assert read == made
    assert read.mixed_precision == "no"
    new = convert_config_to_fsdp2({"fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}})
    assert new["fsdp_config"] == {"fsdp_version": 2, "fsdp_reshard_after_forward": True}


def test_loader_of_another_class_survives_a_later_prepare() -> None:
    class Own(torch.utils.data.DataLoader[int]):
        """Is copied when it is prepared, and must still be an instance of its class."""

    accelerator = DropIn(cpu=True)
    loader = accelerator.prepare(Own(range(4), batch_size=2))  # type: ignore[arg-type]
    accelerator.prepare(torch.nn.Linear(1, 1))
    assert isinstance(loader, Own)
    assert len(list(loader)) == 2
