"""The core has five dependencies."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEPENDENCIES = {"torch", "pluggy", "packaging", "pydantic", "PyYAML"}


def test_core_depends_on_five_libraries() -> None:
    text = (ROOT / "core" / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)\]", text, re.S | re.M)
    assert block is not None
    assert set(re.findall(r'"([A-Za-z]+)', block[1])) == DEPENDENCIES
