"""The suite: files and S3 for one process and two ranks, memory and an archive for one."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from accelerate_testing import CheckpointerSuite

#: Where damaging.py is.
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
        """Lead the checks to the server."""
        type(self).environ = {"PYTHONPATH": HERE, **s3}
