"""The conformance suite on our own plugins."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import pytest

from accelerate_testing import (
    BackendSuite,
    CheckpointerSuite,
    LauncherSuite,
    PrecisionSuite,
    TrackerSuite,
)
from accelerate_testing.checks import checks_of

# `short` lists the checks of a suite that may have other results than in the suite above it. The
# others only run in `make soak`.
HERE = Path(__file__).parent
READERS = {"PYTHONPATH": f"{HERE}:{HERE.parent / 'trackers'}"}


@pytest.mark.dist
class TestDDP(BackendSuite):
    plugin = "ddp"


@pytest.mark.dist
class TestDDPOnThree(BackendSuite):
    plugin = "ddp"
    num_processes = 3
    short = (
        *("ranks", "collectives", "objects", "pieces", "loader", "gradients_meet", "accumulation"),
        *("counted_items", "join", "overflow", "groups", "save_and_load"),
    )


@pytest.mark.dist
class TestFSDP2(BackendSuite):
    plugin = "fsdp2"


# The same checks on an accelerator. The device needs interfaces that torch has since 2.13.
@pytest.mark.dist
@pytest.mark.needs("torch>=2.13")
class TestDDPOnADevice(BackendSuite):
    plugin = "ddp"
    device = "fake"


@pytest.mark.dist
@pytest.mark.needs("torch>=2.13")
class TestFSDP2OnADevice(BackendSuite):
    plugin = "fsdp2"
    device = "fake"


@pytest.mark.dist
@pytest.mark.needs("torch>=2.13")
class TestSingleOnADevice(BackendSuite):
    plugin = "single"
    device = "fake"
    num_processes = 1


@pytest.mark.dist
class TestFSDP2Sharded(BackendSuite):
    plugin = "fsdp2"
    short = (
        "save_and_load",
        "save_later",
        "resume",
        "save_fails",
        "kill",
        "once_more",
        "two_at_once",
    )
    environ = {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}


class _Replica(BackendSuite):
    """One replica of two ranks. tests/backends/torchft has the runs of several replicas."""

    timeout = 40.0
    cannot: ClassVar[Mapping[str, str]] = {
        "another_size": "two processes that start alone are two replicas, and one heals the other",
        "two_at_once": "a process can only be in one quorum",
    }

    @pytest.fixture(autouse=True)
    def environ_with_lighthouse(self, lighthouse: str) -> None:
        """Make the ranks of the checks join the lighthouse, which the launcher torchft would start."""
        type(self).environ = {
            "TORCHFT_LIGHTHOUSE": lighthouse,
            "ACCELERATE_TORCHFT_REPLICAS": "1",
        }


@pytest.mark.dist
@pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed")
class TestTorchFT(_Replica):
    plugin = "torchft"


@pytest.mark.dist
@pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed")
class TestTorchFTWithFSDP2(_Replica):
    plugin = "torchft_fsdp2"
    # These run the same code as in the suites of torchft and fsdp2.
    short = tuple(
        checks_of("backend").keys()
        - {"imports", "settings", "error_on_one_rank", "objects", "pieces", "loader"}
        - {"accepts", "compiled", "forms_of_models", "kinds_of_models", "precisions"}
    )


@pytest.mark.dist
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
class TestDeepSpeed(BackendSuite):
    plugin = "deepspeed"
    timeout = 40.0
    environ = {"PYTHONPATH": str(HERE.parent / "backends" / "deepspeed")}
    prelude = "cpu_has_fp16"
    more = "deepspeed"


class _ZeroStage(BackendSuite):
    """A stage of ZeRO other than the 2 of the suite above."""

    timeout = 40.0
    prelude = "cpu_has_fp16"
    more = "deepspeed"
    short = (
        *("training", "accumulation", "branches", "counted_items", "no_sync", "clip_norm"),
        *("small_gradients", "clip_value", "schedule", "overflow", "save_and_load", "groups"),
    )


@pytest.mark.dist
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
class TestZeRO0(_ZeroStage):
    plugin = "deepspeed"
    environ = {**TestDeepSpeed.environ, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}


@pytest.mark.dist
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
class TestZeRO1(_ZeroStage):
    plugin = "deepspeed"
    environ = {**TestDeepSpeed.environ, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}


@pytest.mark.dist
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
class TestZeRO3(_ZeroStage):
    plugin = "deepspeed"
    environ = {**TestDeepSpeed.environ, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
    short = (
        *_ZeroStage.short,
        *("kinds_of_models", "several_models", "once_more"),  # frozen models have an engine
    )


@pytest.mark.dist
class TestMegatron(BackendSuite):
    plugin = "megatron"
    timeout = 40.0
    environ = {"PYTHONPATH": str(HERE.parent / "backends" / "megatron")}
    prelude = "megatron_on_cpu"


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
class TestBFloat16(PrecisionSuite):
    plugin = "bf16"


@pytest.mark.dist
class TestFP8(PrecisionSuite):
    plugin = "fp8"
    environ = {"PYTHONPATH": str(HERE)}
    prelude = "fp8_of_all_layers"


@pytest.mark.dist
class TestFP8OfRows(PrecisionSuite):
    plugin = "fp8"
    environ = {**TestFP8.environ, "ACCELERATE_FP8_RECIPE": "rowwise_with_gw_hp"}
    prelude = TestFP8.prelude
    short = ("one_process", "two_processes")


@pytest.mark.dist
class TestFP8OfFSDP2(PrecisionSuite):
    plugin = "fp8"
    environ = {**TestFP8.environ, "ACCELERATE_BACKEND": "fsdp2"}
    prelude = TestFP8.prelude
    short = ("two_processes", "save_and_load")


@pytest.mark.dist
class TestFloat16(PrecisionSuite):
    plugin = "fp16"


@pytest.mark.dist
@pytest.mark.skipif(
    not Path(sys.prefix, "unpacked", "transformer_engine").exists(), reason="make unpacks its wheel"
)
class TestFP8ByTransformerEngine(PrecisionSuite):
    """With a stand-in for the library."""

    plugin = "fp8"
    environ = {
        "ACCELERATE_FP8_BACKEND": "TE",
        "PYTHONPATH": f"{HERE.parent}:{HERE.parent / 'backends' / 'fp8'}",
    }
    prelude = "te_prelude"
    short = ("two_processes", "save_and_load", "needs", "forward_collectives", "compiled")


@pytest.mark.dist
class TestFP8ByMSAMP(PrecisionSuite):
    """With a stand-in for the library."""

    plugin = "fp8"
    options = {"optimizer": "Adam", "one_model": True}
    environ = {
        "ACCELERATE_FP8_BACKEND": "MSAMP",
        "PYTHONPATH": f"{HERE.parent}:{HERE.parent / 'backends' / 'fp8'}",
    }
    prelude = "msamp_prelude"


@pytest.mark.dist
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
class TestFloat16OfDeepSpeed(PrecisionSuite):
    plugin = "fp16"
    timeout = 40.0
    environ = {**TestDeepSpeed.environ, "ACCELERATE_USE_DEEPSPEED": "true"}
    prelude = "cpu_has_fp16"
    more = "deepspeed"


@pytest.mark.dist
class TestDirectory(CheckpointerSuite):
    plugin = "directory"


@pytest.mark.dist
class TestDirectoryOfShards(CheckpointerSuite):
    plugin = "directory"
    environ = {**TestFSDP2Sharded.environ, "ACCELERATE_BACKEND": "fsdp2"}


@pytest.mark.dist
@pytest.mark.needs("obstore")
@pytest.mark.needs("moto")
class TestObjectStore(CheckpointerSuite):
    plugin = "object_store"
    options = {"target": "s3://tests/{name}", "damage": "s3_server:damage"}

    @pytest.fixture(autouse=True)
    def server(self, s3: Mapping[str, str]) -> None:
        """Make the checks use an S3 server."""
        type(self).environ = {"PYTHONPATH": str(HERE.parent), **s3}


@pytest.mark.dist
class TestTorchrun(LauncherSuite):
    plugin = "torchrun"


class TestSimple(LauncherSuite):
    plugin = "simple"


class TestKubernetes(LauncherSuite):
    plugin = "kubernetes"
    environ = {
        "ACCELERATE_KUBERNETES_IMAGE": "registry.example/train:1",
        "ACCELERATE_KUBERNETES_OUTPUT": "job.yaml",  # without kubectl and a cluster
    }


#: Settings with which trackers need no account and no network.
_OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "SWANLAB_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "COMET_OFFLINE_DIRECTORY": "comet",
    "COMET_START_ONLINE": "0",
    "COMET_DISABLE_AUTO_LOGGING": "1",
    "TRACKIO_DIR": "trackio",
    "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db",
    "DVC_NO_ANALYTICS": "1",
}


class _Offline(TrackerSuite):
    environ = {**_OFFLINE, **READERS}
    timeout = 60.0


class TestWandB(_Offline):
    plugin = "wandb"
    # Two runs of one second have one file.
    options = {"init": {"dir": "."}, "read": "suite_readers:wandb", "resumes": False}


class TestTrackio(_Offline):
    plugin = "trackio"
    options = {"init": {"auto_log_gpu": False, "auto_log_cpu": False}, "prints": True}


class TestAim(_Offline):
    plugin = "aim"
    options = {"init": {"system_tracking_interval": None, "capture_terminal_logs": False}}


class TestCometML(_Offline):
    plugin = "comet_ml"
    options = {"read": "suite_readers:comet_ml"}


class TestMLflow(_Offline):
    plugin = "mlflow"
    options = {"elsewhere": True}  # in the database that the first run has made


class TestClearML(_Offline):
    plugin = "clearml"
    options = {
        "init": {"auto_resource_monitoring": False, "auto_connect_streams": False},
        "elsewhere": True,  # in the cache at home
        "resumes": False,  # but of a task that a server has
        "prints": True,
    }


class TestDVCLive(_Offline):
    plugin = "dvclive"
    options = {"init": {"save_dvc_exp": False, "dvcyaml": None}, "overwrites": True}


class TestSwanLab(_Offline):
    plugin = "swanlab"
    options = {"prints": True}
