"""Contract of `mps` and `xpu`: what is declared for them, and what torch is asked for, without the hardware.

Functions of torch that need the hardware are replaced by ones that record their calls and have torch's
own signatures.
"""

from __future__ import annotations

import os
import re
import subprocess
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch
import torch.distributed as dist

from accelerate_checkpoint.rng_state import capture_rng_state, restore_rng_state
from accelerate_core.backend.precision import BFloat16
from accelerate_core.builtin.memory import clear_device_cache
from accelerate_core.contract.topology import Process, Topology
from accelerate_core.data.device_feed import feed
from accelerate_core.data.rng import check_rng_types
from accelerate_core.distributed import process
from accelerate_core.errors import ConfigurationError
from accelerate_core.plugins.devices import check_precision, device_plugin
from accelerate_core.plugins.discovery import installed
from accelerate_launch import devices

ROOT = Path(__file__).parents[2]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Make torch report devices of a type, and return the list of indices that were selected."""

    def with_devices(kind: str, count: int) -> list[int]:
        selected: list[int] = []
        here = torch.device(kind)
        replaced = {
            "current_accelerator": lambda check_available=False: here,
            "is_available": lambda: True,
            "device_count": lambda: count,
            "current_device_index": lambda: 0,
            "set_device_index": selected.append,
        }
        for name, function in replaced.items():
            monkeypatch.setattr(torch.accelerator, name, function)
        return selected

    return with_devices


def ranks(count: int, local: int = 0, on_machine: int | None = None) -> Topology:
    return Topology(local, count, local, count if on_machine is None else on_machine, "a test")


# ---- what is declared ----


@pytest.mark.parametrize(
    ("kind", "variable", "builds", "label", "float64"),
    [
        ("cuda", "CUDA_VISIBLE_DEVICES", ("cuda", "hip", "rocm"), "GPU", True),
        ("xpu", "ZE_AFFINITY_MASK", ("xpu",), "", False),
        ("mps", "", (), "", False),
    ],
)
def test_declarations(kind, variable, builds, label, float64) -> None:
    plugin = device_plugin(kind)
    assert plugin.name == kind
    assert (plugin.visible_devices, plugin.builds) == (variable, builds)
    assert (plugin.label, plugin.float64) == (label, float64)
    assert (plugin.collectives, plugin.precisions) == ("", None)


def test_our_distributions_declare_only_devices_that_are_part_of_torch() -> None:
    records = installed().of_kind("device")
    ours = {record.name for record in records if record.distribution == "accelerate-launch"}
    assert ours == {"cuda", "mps", "xpu"}


def test_core_names_no_device_outside_of_the_catalogue() -> None:
    names = re.compile(r"\b(cuda|xpu|npu|mlu|musa|sdaa|hpu|neuron|mps)\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line}"
        for path in sorted((ROOT / "core" / "src").rglob("*"))
        if path.suffix in (".py", ".pyi", ".json") and path.name != "known_packages.json"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if names.search(line)
    ]
    assert found == []


# ---- the device, and its collectives ----


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_one_process_uses_the_current_device(kind, machine) -> None:
    selected = machine(kind, 1)
    assert process.default_device(ranks(1), cpu=False) == torch.device(kind, 0)
    assert selected == [0]


def test_ranks_use_one_xpu_each(machine) -> None:
    selected = machine("xpu", 4)
    chosen = [process.default_device(ranks(4, local), cpu=False) for local in range(4)]
    assert chosen == [torch.device("xpu", local) for local in range(4)]
    assert selected == [0, 1, 2, 3]


def test_more_ranks_than_xpus_is_an_error(machine) -> None:
    machine("xpu", 2)
    with pytest.raises(ConfigurationError, match=r"4 processes .* 2 xpu device\(s\)"):
        process.default_device(ranks(4), cpu=False)


@pytest.mark.parametrize("on_machine", [2, 1], ids=["one machine", "two machines"])
def test_several_processes_run_on_the_cpu_instead_of_mps(on_machine, machine) -> None:
    """torch maps mps to gloo, but gloo's tensors may only be on the CPU or on CUDA."""
    machine("mps", 1)
    with pytest.warns(UserWarning, match="no collectives for mps devices"):
        chosen = process.default_device(ranks(2, on_machine=on_machine), cpu=False)
    assert chosen == torch.device("cpu")


def test_xpu_group_uses_xccl_and_gloo_for_cpu_tensors(monkeypatch) -> None:
    started: dict = {}
    monkeypatch.setattr(dist, "init_process_group", lambda **options: started.update(options))
    process.start_group(
        Process(
            **vars(ranks(2)), device=torch.device("xpu", 0), store="the store", timeout=timedelta(9)
        )
    )
    assert started["backend"] == "cpu:gloo,xpu:xccl"
    assert started["store"] == "the store"
    # torch couldn't create groups with gloo alone if the group were bound to the device.
    assert "device_id" not in started


# ---- precisions ----


@pytest.mark.parametrize("kind", ["mps", "xpu"])
@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
def test_precisions_that_torch_has_are_accepted(kind, precision) -> None:
    check_precision(kind, precision)
    if precision != "no":
        assert torch.amp.is_autocast_available(kind)


def test_bf16_is_refused_if_torch_says_that_the_device_lacks_it(monkeypatch) -> None:
    runtime = SimpleNamespace(device=torch.device("xpu", 0))
    monkeypatch.setattr(torch.xpu, "is_bf16_supported", lambda: False)
    with pytest.raises(ConfigurationError, match="This xpu device lacks bfloat16"):
        BFloat16().check(runtime)
    monkeypatch.setattr(torch.xpu, "is_bf16_supported", lambda: True)
    BFloat16().check(runtime)


@pytest.mark.parametrize("kind", ["mps", "xpu"])
@pytest.mark.parametrize("library", ["msamp.MSAMP", "transformer_engine.TransformerEngine"])
def test_fp8_libraries_for_cuda_refuse_the_device(kind, library) -> None:
    module, _, name = library.partition(".")
    precision = getattr(import_module(f"accelerate_fp8.{module}"), name)
    made = precision.__new__(precision)  # its constructor needs settings
    with pytest.raises(ConfigurationError, match=kind):
        made.check(SimpleNamespace(device=torch.device(kind)))


# ---- feeding ----


def xpu_streams(events: list[str]) -> tuple[type, type]:
    """Return replacements of `torch.xpu.Stream` and `torch.Event` that record what they are asked.

    The streams of xpu are `torch.Stream` objects, like these.
    """
    kind = int(torch._C._autograd.DeviceType.XPU.value)

    class Stream(torch.Stream):
        def __new__(cls, device):
            return super().__new__(cls, stream_id=1, device_index=device.index, device_type=kind)

        def __enter__(self):
            events.append("enter side stream")

        def __exit__(self, *exception):
            events.append("leave side stream")

        def wait_event(self, event):
            events.append("wait for event")

    class Event:
        def __init__(self, device):
            assert device.type == "xpu"

        def record(self, stream):
            events.append("record event")

    return Stream, Event


@pytest.fixture
def copies(monkeypatch) -> list[str]:
    """Record pinning, copies to a device and uses by streams, which need the hardware."""
    events: list[str] = []
    original = torch.Tensor.to

    def to(tensor, device, non_blocking=False):
        if torch.device(device).type == "cpu":
            return original(tensor, device)
        events.append("copy without waiting" if non_blocking else "copy")
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: events.append("pin") or t)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda t, s: events.append("in use by another stream")
    )
    return events


def test_batches_for_xpu_are_pinned_and_copied_on_a_side_stream(copies, monkeypatch) -> None:
    device = torch.device("xpu", 0)
    stream, event = xpu_streams(copies)
    own = stream(device)
    monkeypatch.setattr(torch.xpu, "Stream", stream)
    monkeypatch.setattr(torch, "Event", event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda index: own)
    next(feed(iter([torch.ones(2), torch.ones(2)]), device))
    copied = [
        "enter side stream",
        "pin",
        "copy without waiting",
        "record event",
        "leave side stream",
    ]
    # The second batch is copied while the caller works on the first.
    assert copies == [*copied, *copied, "wait for event", "in use by another stream"]


def test_batches_for_mps_are_copied_when_requested_without_pinning(copies) -> None:
    assert not hasattr(torch.mps, "Stream")
    batches = feed(iter([torch.ones(2), torch.ones(2)]), torch.device("mps", 0))
    next(batches)
    assert copies == ["copy"]
    next(batches)
    assert copies == ["copy", "copy"]


# ---- random states and memory ----


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_random_states_are_saved_and_restored_with_torchs_functions(kind, monkeypatch) -> None:
    module = torch.get_device_module(kind)
    state = torch.arange(4, dtype=torch.uint8)
    get = create_autospec(module.get_rng_state, return_value=state)
    put = create_autospec(module.set_rng_state)
    monkeypatch.setattr(module, "get_rng_state", get)
    monkeypatch.setattr(module, "set_rng_state", put)
    device = torch.device(kind, 0)
    saved = capture_rng_state([device])
    get.assert_called_once_with(device)
    assert restore_rng_state(saved) == []
    put.assert_called_once_with(state, device)
    assert check_rng_types([kind]) == [kind]


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_memory_is_released_with_the_module_of_the_device(kind, machine, monkeypatch) -> None:
    """With torch 2.9 to 2.12, `torch.accelerator.empty_cache` raises on mps."""
    machine(kind, 1)
    module = torch.get_device_module(kind)
    empty = create_autospec(module.empty_cache)
    monkeypatch.setattr(module, "empty_cache", empty)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    clear_device_cache()
    empty.assert_called_once_with()


# ---- launch ----


def test_gpu_ids_select_xpus_with_the_variable_of_level_zero(monkeypatch) -> None:
    monkeypatch.setattr(devices, "torch_build", lambda: {"xpu": "20250301"})
    assert devices.visible_devices_variable() == "ZE_AFFINITY_MASK"


def test_gpu_ids_are_an_error_on_mps(monkeypatch) -> None:
    monkeypatch.setattr(devices, "torch_build", dict)
    with pytest.raises(ConfigurationError, match="gpu_ids is set, but"):
        devices.visible_devices_variable()


def test_launch_counts_the_device_of_a_mac(tmp_path: Path, monkeypatch) -> None:
    """torch's build for macOS is a CPU build by its version, but has a device."""
    (tmp_path / "torch.py").write_text(
        "class accelerator:\n    device_count = lambda: 1\n    is_available = lambda: True\n"
    )
    monkeypatch.setattr(devices, "torch_build", dict)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    asked = create_autospec(subprocess.run, side_effect=subprocess.run)
    monkeypatch.setattr(devices.subprocess, "run", asked)
    monkeypatch.setattr(devices.sys, "platform", "linux")
    assert devices.count_accelerators(environ) == 0
    asked.assert_not_called()
    monkeypatch.setattr(devices.sys, "platform", "darwin")
    assert devices.count_accelerators(environ) == 1
