"""Checks of a plugin that cannot run on this machine are skipped, not passed on the CPU or failed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import dummies
import pytest
import torch
from support import clean_environment

from accelerate_testing.runner import _device_count

PLUGINS = """
from accelerate_core import Backend, BackendSettings, Precision, option, settings
from accelerate_core.errors import ConfigurationError

@settings(env_prefix="ACCELERATE_FAR_", section="far_config", argument="far_plugin")
class Far(BackendSettings):
    every: int = option(default=1, help="steps between two of something", ge=1)

class B(Backend):
    name = "far"
    api_version = (1, 0)
    reduces_gradients = "never"
    supports = {"devices": ("cuda",), "join": True}
    Settings = Far

class P(Precision):
    name = "narrow"
    api_version = (1, 0)
    def check(self, runtime):
        if runtime.device.type == "cpu":
            raise ConfigurationError("narrow has no kernels for the CPU.")
"""


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has a device")
@pytest.mark.parametrize(
    ("name", "general", "why"),
    [
        (
            "far",
            {
                "imports",
                "metadata",
                "api_version",
                "hooks",
                "selection",
                "declarations",
                "settings",
                "exits",
            },
            "it needs a cuda device",
        ),
        (
            "narrow",
            {"imports", "metadata", "api_version", "hooks", "exits"},
            "it needs another device: narrow has no kernels for the CPU.",
        ),
    ],
)
def test_checks_that_need_a_device_are_skipped_by_name(
    tmp_path: Path, name: str, general: set[str], why: str
) -> None:
    points = {"backends": {"far": "B"}, "precisions": {"narrow": "P"}}
    dummies.distribution(tmp_path, "far", PLUGINS, points)
    metadata = tmp_path / "dummy_far-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text() + "Requires-Dist: accelerate-core\n")
    env = clean_environment()
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
    command = [sys.executable, "-m", "accelerate_core", "plugins", "check", name, "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    checks = {one["name"]: one for one in json.loads(done.stdout)["checks"]}
    failed = {check: one["error"] for check, one in checks.items() if one["state"] == "failed"}
    assert (done.returncode, failed) == (0, {})
    assert {check for check, one in checks.items() if one["state"] == "passed"} == general
    skipped = {check: one["detail"] for check, one in checks.items() if check not in general}
    assert len(skipped) > 4
    undeclared = {check for check, said in skipped.items() if "does not declare" in said}
    own = {"settings"} if name == "narrow" else set()  # it has none
    assert {skipped[check] for check in skipped.keys() - undeclared - own} == {why}


@pytest.mark.needs("torch>=2.13")
def test_checks_on_ranks_are_skipped_with_one_warning_if_there_are_too_few_devices() -> None:
    command = [sys.executable, "-m", "accelerate_core", "plugins", "check", "ddp", "--json"]
    command += ["--device", "fake", "--env", "ACCELERATE_TESTING_FAKE_DEVICES=1"]
    for name in ("declarations", "selection", "training", "collectives", "save_and_load"):
        command += ["--only", name]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    why = "num_processes=2 needs as many fake devices, and there are only 1"
    assert done.stderr.count(f"The checks on ranks are skipped: {why}.") == 1
    checks = json.loads(done.stdout)["checks"]
    skipped = {one["name"]: one["detail"] for one in checks if one["state"] == "skipped"}
    assert skipped == dict.fromkeys(("training", "collectives", "save_and_load"), why)
    assert {one["name"] for one in checks if one["state"] == "passed"} == {
        "declarations",
        "selection",
    }


@pytest.mark.needs("torch>=2.13")
def test_devices_that_a_prelude_adds_are_counted() -> None:
    environ = clean_environment() | {"ACCELERATE_TESTING_FAKE_DEVICES": "3"}
    assert _device_count("vendor", "accelerate_testing.fake_device.auto", environ) == 3
    assert _device_count("vendor", "no_such_module", environ) is None


DEVICE = """
from accelerate_core.plugin import DevicePlugin

class Narrow(DevicePlugin):
    name = "fake"
    api_version = (1, 0)
    precisions = ("no", "bf16")
"""


@pytest.mark.needs("torch>=2.13")
def test_precisions_of_the_suite_run_on_a_device_that_lists_its_own(tmp_path: Path) -> None:
    dummies.distribution(tmp_path, "narrow", DEVICE, {"devices": {"fake": "Narrow"}})
    env = clean_environment()
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
    command = [sys.executable, "-m", "accelerate_core", "plugins", "check", "ddp", "--json"]
    command += ["--device", "fake", "--num_processes", "1", "--only", "accepts"]
    command += ["--only", "precisions"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=540)
    checks = {one["name"]: one for one in json.loads(done.stdout)["checks"]}
    assert checks["accepts"]["state"] == "passed", checks["accepts"]["error"]
    assert (
        "fp16 refused: mixed_precision='fp16' does not run on fake"
        in checks["precisions"]["detail"]
    )
