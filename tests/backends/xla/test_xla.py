"""Training on one XLA device, and on a mesh of four with one process, compared with torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch_xla")
#: The first test that needs a setup waits until all cases of that setup have run.
pytestmark = pytest.mark.timeout(900)

WORKER = Path(__file__).with_name("xla_worker.py")
MESHES = ("dp", "fsdp", "tp_dp", "hybrid")
#: Setup -> number of XLA devices, or None for torch on the CPU.
DEVICES = {"cpu": None, "ddp": None, "mesh": 4, "refused": 4, "of_ddp_mesh": 4}


class Found:
    """The results of each setup, whose processes run when a test first needs them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, dict[str, Any]] = {}

    def __call__(self, setup: str, case: str, rank: int = 0) -> Any:
        name = f"{setup}_{rank}"
        if name not in self._known:
            if not (self.folder / f"{name}.json").exists():
                self._run(setup)
            self._known[name] = json.loads((self.folder / f"{name}.json").read_text())
        value = self._known[name][case]
        assert not (isinstance(value, str) and value.startswith("Traceback")), value
        return value

    def _run(self, setup: str) -> None:
        hidden = ("ACCELERATE_", "PJRT_", "XLA_", "RANK", "WORLD_SIZE", "MASTER_")
        environ = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
        environ |= {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        devices = DEVICES.get(setup, 1)
        if devices is not None:
            environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}
        command = [sys.executable, str(WORKER), setup, str(self.folder)]
        if setup == "ddp":
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
            command[1:1] = launch
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("xla"))


def close(one: Any, other: Any, limit: float) -> None:
    assert len(one) == len(other)
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) <= limit


def test_one_device_trains_like_torch(found: Found) -> None:
    expected, losses = found("cpu", "parity"), found("one", "parity")
    close(losses["no"], expected["no"], 1e-5)
    close(losses["bf16"], expected["bf16"], 1e-2)


@pytest.mark.parametrize("mesh", [*MESHES, "bf16"])
def test_mesh_trains_like_torch(found: Found, mesh: str) -> None:
    expected = found("cpu", "parity")["bf16" if mesh == "bf16" else "no"]
    limit = 1e-2 if mesh == "bf16" else 1e-5
    close(found("mesh", "parity_of_meshes")[mesh], expected, limit)


@pytest.mark.parametrize("setup", ["one", "mesh"])
def test_counted_items_stay_on_the_device(found: Found, setup: str) -> None:
    counted = found(setup, "counted")
    # The last batch is padded with its own samples, so its sum and its count are doubled.
    *before, last = found("cpu", "counted")["losses"]
    close(counted["losses"], [*before, 2 * last], 1e-4)
    assert counted["fallbacks"] == ["aten::_local_scalar_dense"], "only from reading a loss"


@pytest.mark.parametrize("setup", ["one", "mesh"])
def test_last_batch_is_padded_and_metrics_are_exact(found: Found, setup: str) -> None:
    seen = found(setup, "metrics_are_exact")
    assert seen["shapes"] == [[8, 1]]
    assert seen["kept"] == [float(one) for one in range(22)]


@pytest.mark.parametrize("setup", ["one", "mesh"])
def test_tied_weights_stay_tied_on_the_device(found: Found, setup: str) -> None:
    expected, result = found("cpu", "ties"), found(setup, "ties")
    close(result.pop("losses"), expected["losses"], 1e-5)
    assert result == {"tied": True, "trained": 1, "state": ["cpu", "cpu"], "one": True}


def test_nothing_is_compiled_after_the_second_step(found: Found) -> None:
    # Micro-batches of two steps, a short last cycle and a short last batch, a second epoch.
    counts = found("one", "graphs")
    assert counts[3] > 0
    assert set(counts[4:16]) == {counts[3]}
    assert set(counts[16:]) == {0}


def test_new_shape_that_needs_a_new_graph_gives_a_warning(found: Found) -> None:
    warnings = found("one", "new_shape_gives_a_warning")
    assert len(warnings) == 3, "and no more"
    assert "The batch has a new shape, [5, 8] (before: [4, 8])" in warnings[0]


def test_new_shapes_are_found_in_short_epochs(found: Found) -> None:
    warnings = found("one", "short_epochs_are_watched")
    assert "new shape, [26, 8] (before: [24, 8] and [25, 8])" in warnings[0]


def test_loss_on_the_device_is_logged_in_each_step(found: Found) -> None:
    steps, rows = found("one", "logged")
    assert rows == steps == 96


@pytest.mark.parametrize("setup", ["one", "mesh"])
def test_shards_saved_within_a_cycle_resume_at_the_next_micro_batch(
    found: Found, setup: str
) -> None:
    seen = found(setup, "within_a_cycle")
    assert seen["resumed"] == seen["whole"][5:]


def test_same_seed_gives_the_same_numbers(found: Found) -> None:
    first, again, other = found("one", "random_numbers")
    assert first == again != other


def test_compiler_is_available_under_accelerates_names(found: Found) -> None:
    (eager,) = found("cpu", "compilers").values()
    by_name = found("one", "compilers")
    assert len(by_name) == 3
    for losses in by_name.values():
        close(losses, eager, 1e-5)


def test_downcast_bf16_keeps_parameters_in_bf16(found: Found) -> None:
    losses, dtypes = found("one", "downcast")
    assert dtypes == ["torch.bfloat16"]
    assert all(0 < loss < 3 for loss in losses)


def test_explain_shows_devices_shardings_and_metrics(found: Found) -> None:
    text, devices, processes = found("mesh", "explained")
    assert (devices, processes) == (4, 1)
    assert "XLA on CPU: 4 device(s)\nover dp_shard: 4 parameters, 424 bytes per device" in text
    assert "graphs compiled: " in text
    assert "transfers to the device: " in text


REFUSED = {
    ("one", "refused", "fp16"): "which needs 'loss_scaling'",
    (
        "one",
        "refused",
        "downcast",
    ): "downcast_bf16 needs mixed_precision='bf16', but mixed_precision is 'no'",
    ("one", "refused", "cpu"): "does not run on the device type 'cpu'",
    ("one", "refused", "touched"): "SPMD must be turned on before the process uses an XLA device",
    (
        "refused",
        "refused_meshes",
        "size",
    ): "dp_shard 3 = 3 devices, but XLA has 4 (CPU_NUM_DEVICES)",
    ("refused", "refused_meshes", "dimension"): "does not support the mesh dimension 'cp'",
    ("refused", "refused_meshes", "no plan"): "Tensor parallelism needs a plan",
    (
        "refused",
        "refused_meshes",
        "no module",
    ): "'fc' in the tensor parallel plan matches no module",
    ("refused", "refused_meshes", "style"): "Did you mean 'colwise'?",
    ("refused", "refused_meshes", "kind"): "splits '1', a Tanh, but only Linear and Embedding",
    (
        "refused",
        "refused_meshes",
        "divides",
    ): "Dimension 1 of 0.weight, with shape [4, 6], is not divisible",
    ("refused", "refused_meshes", "tie"): "is shared with another module",
    ("refused", "refused_meshes", "other mesh"): "torch_xla.spmd exists once per process",
    ("refused", "refused_meshes", "no mesh"): "XLA cannot turn SPMD off again",
}


@pytest.mark.parametrize(("where", "text"), REFUSED.items(), ids=lambda one: str(one)[:40])
def test_unsupported_setup_gives_a_clear_error(found: Found, where: Any, text: str) -> None:
    setup, case, name = where
    error = found(setup, case)[name]
    assert text in error
    assert "no error, but" not in error


GROUP = """
import torch.distributed, torch_xla
torch.distributed.init_process_group("xla", init_method="xla://")
print(f"alone: {torch.distributed.get_world_size() == 1}")
"""


def several(folder: Path, before: str = "") -> Any:
    environ = {**os.environ, "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    code = folder / "several.py"
    code.write_text(f"{before}from accelerate_core import Accelerator; Accelerator()")
    done = subprocess.run(
        [sys.executable, *launch, str(code)],
        env=environ, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0
    return done


def test_several_processes_on_the_cpu_are_rejected(found: Found) -> None:
    done = several(found.folder)
    assert "XLA does not connect processes, so each would train alone" in done.stderr
    assert "set CPU_NUM_DEVICES=2 and pass a ParallelismConfig" in done.stderr


def test_torch_xlas_process_group_on_the_cpu_is_rejected(found: Found) -> None:
    done = several(found.folder, GROUP)
    assert done.stdout.count("alone: True") == 2, "and without an error"
    assert "each would be alone in its group" in done.stderr
    assert "each would be alone in its group" in found("one", "device_tensors_in_torch")["group"]
    # With a mesh, torch_xla itself raises the error.
    assert "not supported with SPMD" in found("mesh", "device_tensors_in_torch")["group"]


@pytest.mark.parametrize("setup", ["one", "mesh"])
def test_torch_distributed_rejects_device_tensors(found: Found, setup: str) -> None:
    errors = found(setup, "device_tensors_in_torch")
    del errors["group"]
    assert errors.pop("unchanged") == [[1.0] * 3] * 2, "tensors of the host are not rejected"
    assert len(errors) == 17
    expected = (
        "DistributedOperationException: torch.distributed was called with a tensor on an XLA device"
    )
    assert [name for name, text in errors.items() if not text.startswith(expected)] == []


def test_generator_of_xla_can_be_synchronized(found: Found) -> None:
    seen = found("one", "generators")
    assert seen["types"] == ["xla", "torch"]
    assert seen["draws"][0] == seen["draws"][1]
    elsewhere = found("cpu", "no_generator")
    assert elsewhere.startswith("ConfigurationError: rng_types contains 'xla'")
    assert "Allowed values are 'torch', 'generator', 'cuda', " in elsewhere


def test_mesh_shards_weights_optimizer_state_and_batches(found: Found) -> None:
    whole = 4 * (8 * 16 + 16 + 16 * 4 + 4)
    seen = found("mesh", "sharded")
    held = {mesh: (one["weights"], one["optimizer"]) for mesh, one in seen.items()}
    over_tp = 4 * (8 * 16 + 16 + 16 * 4) // 2 + 4 * 4
    assert held == {
        "dp": (whole, 2 * whole),
        "fsdp": (whole // 4, 2 * whole // 4),
        "tp_dp": (over_tp, 2 * over_tp),
        "hybrid": (whole // 2, 2 * whole // 2),
    }
    assert seen["fsdp"]["specs"][0] == "{devices=[4,1]0,1,2,3}"
    assert seen["dp"]["batch"] == ["{devices=[4,1]0,1,2,3}", "{devices=[4]0,1,2,3}"]
    assert seen["fsdp"]["explained"] == [
        f"over dp_shard: 4 parameters, {whole // 4} bytes per device"
    ]


SAVED = [
    (setup, f"{mesh}_{kind}")
    for setup, mesh in (("one", "one"), ("mesh", "fsdp"), ("mesh", "tp_dp"))
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
]


@pytest.mark.parametrize(("setup", "name"), SAVED)
def test_checkpoint_resumes_bit_for_bit(found: Found, setup: str, name: str) -> None:
    seen = found(setup, "saved")[name]
    assert seen["same"], "including the state saved in the background"
    assert ("backend_xla" in seen["files"]) == ("SHARDED" in name)
    if "fsdp" in name:
        assert all("devices=[4" in one for one in seen["specs"] + seen["state"])


def test_shards_load_with_another_mesh_but_not_with_another_model(found: Found) -> None:
    seen = found("mesh", "saved")
    close(seen["other mesh"], seen["tp_dp_SHARDED_STATE_DICT"]["losses"], 1e-6)
    assert "CheckpointError" in seen["other model"]


@pytest.mark.parametrize("setup", ["one", "mesh"])
def test_killed_run_resumes(found: Found, setup: str) -> None:
    seen = found(setup, "killed")
    assert seen["rc"] == -9
    assert seen["losses"] == json.loads(seen["stdout"])


@pytest.mark.parametrize("setup", ["one", "mesh"])
def test_ddp_and_xla_load_each_others_checkpoints(found: Found, setup: str) -> None:
    found(setup, "saved")
    found("mesh" if setup == "one" else "one", "saved")
    ddp, of_ddp = found("ddp", "ddp"), found(f"of_ddp_{setup}", "of_ddp")
    close(of_ddp["losses"], ddp["losses"], 1e-5)
    name = "one" if setup == "one" else "fsdp"
    close(of_ddp["read"], ddp["read"][f"{name}_FULL_STATE_DICT"], 1e-5)
