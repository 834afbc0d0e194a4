"""Lets every test import the helpers in this folder: pytest puts a conftest's folder on the path."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec

import pytest
from packaging.requirements import Requirement


@pytest.fixture(scope="module", autouse=True)
def _each_file_begins_with_no_accelerator() -> Iterator[None]:
    """Drop what a file's tests have left running: which file is next differs from run to run."""
    # A collection takes a second in a process that has imported all our libraries, and many tests
    # ask for one: what is there before the first test of a file is left out from then on.
    gc.collect()
    gc.freeze()
    yield
    runtime = sys.modules.get("accelerate_core.distributed.process")
    if runtime is not None:
        while (left := runtime.current_user()) is not None:
            runtime.release(left)
        runtime.release(None)  # one that was used by nobody, or by what is gone


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        wanted = Requirement(mark.args[0])
        found = find_spec(wanted.name) and version(wanted.name)
        if not found or not wanted.specifier.contains(found, prereleases=True):
            pytest.skip(f"{wanted} is not installed")
