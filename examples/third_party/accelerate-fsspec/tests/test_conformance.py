"""The suite: files for one process and two ranks, memory and an archive for one."""

import os
from pathlib import Path

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
