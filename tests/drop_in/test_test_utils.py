"""What tests of code on Accelerate import from it, and the private members they use."""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import support
import torch

from accelerate_core import Accelerator, AcceleratorState, GradientState, PartialState
from accelerate_drop_in import private  # noqa: F401
from accelerate_drop_in.testing import helpers
from accelerate_drop_in.testing.training import RegressionDataset, RegressionModel


@pytest.fixture(autouse=True)
def _end() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(True)  # type: ignore[attr-defined]


def test_its_scripts_pass_on_two_ranks() -> None:
    run = support.run_workers(Path(__file__).with_name("served_scripts_worker.py"), 2).checked()
    assert len(run.results[0]) == 5
    assert run.results[0] == run.results[1]


def test_a_reset_state_is_made_anew() -> None:
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


def test_prepared_objects_are_listed_where_clients_look() -> None:
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


def test_conditions_skip_and_name_what_is_not_there() -> None:
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


def test_commands_are_run_to_their_end() -> None:
    assert helpers.run_command(["echo", Path("x")], return_stdout=True) == "x\n"
    with pytest.raises(helpers.SubprocessCallException, match="status 3:\n\nno"):
        helpers.run_command(["sh", "-c", "echo no >&2; exit 3"])
    done = helpers.execute_subprocess_async(["sh", "-c", "echo a; echo b >&2"], quiet=True)
    assert (done.stdout, done.stderr) == (["a"], ["b"])
    with pytest.raises(RuntimeError, match="ended with -9"):
        helpers.execute_subprocess_async(["sleep", "60"], timeout=0.2)
    assert helpers.get_launch_command(cpu=True, num_processes=2, fsdp=False) == [
        *("accelerate", "launch", "--cpu", "--num_processes=2")
    ]
    with helpers.assert_exception(ValueError, "bad"):
        raise ValueError("bad value")
    expected = helpers.assert_exception(ValueError, "good")
    with pytest.raises(AssertionError, match="was expected"), expected:
        raise ValueError("bad value")
    assert helpers.capture_call_output(print, 1) == "1\n"
