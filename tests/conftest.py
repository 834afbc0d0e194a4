"""Puts this folder on the import path of every test, sorts slow files first, and adds the mark `needs`."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

#: The slow files of `make test` and `make examples`, in the order in which they start. Short files come last,
#: so that no process works alone at the end. Files that compile the same operators are apart, so that none
#: waits for another.
SLOW = (
    "backends/test_step_counts.py",
    "examples/test_guides.py",
    "backends/fsdp2/test_fsdp2.py",
    "trackers/test_read_back.py",
    "backends/deepspeed/test_deepspeed.py",
    "core/test_plugin_commands.py",
    "core/test_orders.py",
    "core/test_leaving.py",
    "launch/test_launch_options.py",
    "launch/test_launch.py",
    "core/test_data_distributed.py",
    "backends/fsdp2/test_adopted.py",
    "core/test_parity.py",
    "devices/test_fake_device.py",
    "backends/fsdp2/test_resume.py",
    "test_pool.py",
    "tracking/test_tracking_life.py",
    "gpu/test_gpu_rehearsal.py",
    "devices/test_fake_device_ranks.py",
    "drop_in/test_drop_in.py",
    "kubernetes/test_submit.py",
    "launch/test_config_command.py",
    "drop_in/test_signatures.py",
    "launch/test_terminal.py",
    "object_store/test_killed_uploads.py",
    "backends/deepspeed/test_deepspeed_resume.py",
    "core/test_plugin_ideas.py",
    "backends/deepspeed/test_deepspeed_settings.py",
    "launch/test_cluster.py",
    "core/test_requests.py",
    "kubernetes/test_pods.py",
    "launch/test_cli.py",
    "watch/test_dump.py",
    "backends/fsdp2/test_pipeline.py",
    "backends/fsdp2/test_quantized_weights.py",
    "big_model/test_big_model.py",
    "drop_in/test_command_line.py",
    "launch/test_config_files.py",
    "backends/xla/test_tpu_launch.py",
    "core/test_isolation.py",
    "checkpoint/test_storage_suite.py",
    "checkpoint/test_saving.py",
    "launch/test_json_schema.py",
    "drop_in/test_names.py",
)
_ORDER = {Path(__file__).parent / name: place for place, name in enumerate(SLOW)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _ORDER.get(item.path, len(SLOW)))


def pytest_configure() -> None:
    # A shell starts background commands with SIGINT ignored, and so would be all that the tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _no_accelerator_is_left_behind() -> Iterator[None]:
    """Release Accelerators left by the tests of a file, because the order of files varies."""
    # A collection takes a second in a process that has imported all our libraries, and many tests
    # collect. So objects that exist before the first test of a file are excluded from then on.
    gc.collect()
    gc.freeze()
    yield
    runtime = sys.modules.get("accelerate_core.distributed.process")
    if runtime is not None:
        while (left := runtime.current_user()) is not None:
            runtime.release(left)
        runtime.release(None)  # a runtime without a user, or whose user was deleted


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        wanted = Requirement(mark.args[0])
        found = find_spec(wanted.name) and version(wanted.name)
        if not found or not wanted.specifier.contains(found, prereleases=True):
            pytest.skip(f"{wanted} is not installed")
