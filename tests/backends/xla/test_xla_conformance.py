"""The conformance suite on one device and on a mesh of four devices."""

from __future__ import annotations

import pytest

from accelerate_testing.suite import BackendSuite

pytest.importorskip("torch_xla")


class TestOneDevice(BackendSuite):
    plugin = "xla"
    num_processes = 1
    timeout = 40.0
    environ = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}


class TestMesh(BackendSuite):
    plugin = "xla"
    num_processes = 1
    timeout = 40.0
    environ = {**TestOneDevice.environ, "CPU_NUM_DEVICES": "4", "ACCELERATE_XLA_SPMD": "1"}
