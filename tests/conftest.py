"""Puts this folder on the import path of every test, and adds the mark `needs`."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec

import pytest
from packaging.requirements import Requirement


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
