"""The conformance suite: files and S3 with one and two processes, memory and archives with one."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from accelerate_testing import CheckpointerSuite

#: So that the suite finds damaging.py.
HERE = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


class TestFiles(CheckpointerSuite):
    plugin = "fsspec"
    options = {"target": "file://{path}", "damage": "damaging:damage"}
    environ = {"PYTHONPATH": HERE}


class TestMemory(CheckpointerSuite):
    plugin = "fsspec"
    options = {"target": "memory://{name}", "one_process": True, "damage": "damaging:damage"}
    environ = {"PYTHONPATH": HERE}


class TestZip(CheckpointerSuite):
    plugin = "fsspec"
    options = {"target": "zip://{path}", "one_process": True, "damage": "damaging:damage"}
    environ = {"PYTHONPATH": HERE}


class TestS3(CheckpointerSuite):
    plugin = "fsspec"
    options = {"target": "s3://tests/{name}", "damage": "damaging:damage"}

    @pytest.fixture(autouse=True)
    def server(self, s3: Mapping[str, str]) -> None:
        """Make the checks use the server."""
        type(self).environ = {"PYTHONPATH": HERE, **s3}
