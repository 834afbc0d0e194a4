"""Our own plugins keep the suite that others run, from test classes of two lines."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from accelerate_core.testing import (
    BackendSuite,
    LauncherSuite,
    PrecisionSuite,
    TrackerSuite,
)

HERE = Path(__file__).parent
READERS = {"PYTHONPATH": str(HERE)}


@pytest.mark.dist
class TestDDP(BackendSuite):
    plugin = "ddp"


@pytest.mark.dist
@pytest.mark.soak
class TestDDPOnThree(BackendSuite):
    plugin = "ddp"
    num_processes = 3


@pytest.mark.dist
class TestFSDP2(BackendSuite):
    plugin = "fsdp2"


@pytest.mark.dist
@pytest.mark.soak
class TestFSDP2Sharded(BackendSuite):
    plugin = "fsdp2"
    environ = {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}


@pytest.mark.dist
@pytest.mark.soak
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="its library is not installed")
class TestDeepSpeed(BackendSuite):
    plugin = "deepspeed"
    timeout = 40.0


@pytest.mark.dist
class TestJsonl(TrackerSuite):
    plugin = "jsonl"
    options = {"read": "suite_readers:jsonl", "read_config": "suite_readers:jsonl_config"}
    environ = READERS


@pytest.mark.dist
class TestTensorBoard(TrackerSuite):
    plugin = "tensorboard"
    options = {
        "read": "suite_readers:tensorboard",
        "read_config": "suite_readers:tensorboard_config",
    }
    environ = READERS


@pytest.mark.dist
@pytest.mark.soak
class TestBFloat16(PrecisionSuite):
    plugin = "bf16"


@pytest.mark.dist
@pytest.mark.soak
class TestFloat16(PrecisionSuite):
    plugin = "fp16"


@pytest.mark.dist
@pytest.mark.soak
class TestTorchrun(LauncherSuite):
    plugin = "torchrun"


@pytest.mark.soak
class TestSimple(LauncherSuite):
    plugin = "simple"


#: Needs nothing but its own directory: no account, no network.
_OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "SWANLAB_MODE": "local",
    "CLEARML_OFFLINE_MODE": "1",
    "COMET_OFFLINE_DIRECTORY": ".",
    "COMET_MODE": "offline",
    "TRACKIO_DIR": "trackio",
    "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db",
    "DVC_NO_ANALYTICS": "1",
}


class _Offline(TrackerSuite):
    environ = _OFFLINE
    timeout = 60.0


@pytest.mark.soak
class TestWandB(_Offline):
    plugin = "wandb"


@pytest.mark.soak
class TestTrackio(_Offline):
    plugin = "trackio"
    options = {"init": {"auto_log_gpu": False, "auto_log_cpu": False}}


@pytest.mark.soak
class TestAim(_Offline):
    plugin = "aim"
    options = {"init": {"system_tracking_interval": None, "capture_terminal_logs": False}}


@pytest.mark.soak
class TestCometML(_Offline):
    plugin = "comet_ml"


@pytest.mark.soak
class TestMLflow(_Offline):
    plugin = "mlflow"


@pytest.mark.soak
class TestClearML(_Offline):
    plugin = "clearml"
    options = {"init": {"auto_resource_monitoring": False, "auto_connect_streams": False}}


@pytest.mark.soak
class TestDVCLive(_Offline):
    plugin = "dvclive"
    options = {"init": {"save_dvc_exp": False, "dvcyaml": None}, "overwrites": True}


@pytest.mark.soak
class TestSwanLab(_Offline):
    plugin = "swanlab"
