"""`supports={"devices": ...}`: a backend only runs on the device types that it declares."""

from __future__ import annotations

import pytest
import torch

from accelerate_core import Accelerator, Backend, PartialState
from accelerate_core.distributed import process as runtimes
from accelerate_core.errors import ConfigurationError


@pytest.fixture(autouse=True)
def not_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a process without an Accelerator, because other tests may have created one."""
    monkeypatch.setattr(runtimes, "_current", None)


class OnDevices(Backend):
    name = "on_devices"
    api_version = (1, 0)
    reduces_gradients = "never"
    supports = {"devices": ("cuda", "xpu")}

    def init_process_group(self, setup, start):
        raise AssertionError("the process group was started before the check")

    needs_group = True


class OnCpu(Backend):
    name = "on_cpu"
    api_version = (1, 0)
    reduces_gradients = "never"
    supports = {"devices": ("cpu",)}


@pytest.mark.parametrize(
    ("environ", "given", "origin"),
    [
        ({}, {"cpu": True}, "constructor argument cpu"),
        ({"ACCELERATE_USE_CPU": "1"}, {}, "environment variable ACCELERATE_USE_CPU"),
        ({"ACCELERATE_TORCH_DEVICE": "cpu"}, {}, "environment variable ACCELERATE_TORCH_DEVICE"),
    ],
)
def test_requested_device_that_the_backend_does_not_declare_is_refused(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], given: dict[str, bool], origin: str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError) as caught:
        Accelerator(backend=OnDevices, **given)
    message = str(caught.value)
    assert "Backend on_devices" in message
    assert f"does not run on the device type 'cpu' ({origin})" in message
    assert "it declares devices='cuda', 'xpu'" in message
    assert "another backend, or use a machine with 'cuda', 'xpu'" in message
    assert runtimes.running() is None


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has a device")
def test_detected_device_is_checked_before_the_process_group_starts() -> None:
    with pytest.raises(ConfigurationError, match=r"'cpu' \(the device that was detected"):
        Accelerator(backend=OnDevices)
    assert runtimes.running() is None


def test_device_that_the_process_already_uses_is_checked() -> None:
    state = PartialState(cpu=True)
    try:
        with pytest.raises(ConfigurationError, match="this process already runs on it"):
            Accelerator(backend=OnDevices)
    finally:
        state.destroy_process_group()


def test_declared_device_is_used_and_suggested_instead_of_an_undeclared_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = Accelerator(backend=OnCpu, cpu=True)
    assert accelerator.device.type == "cpu"
    accelerator.end_training()
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    with pytest.raises(ConfigurationError, match=r"'meta'.*Accelerator\(cpu=True\)"):
        Accelerator(backend=OnCpu)
