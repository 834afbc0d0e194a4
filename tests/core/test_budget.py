"""The core stays small: a limit on lines of code, short files and five dependencies."""

from __future__ import annotations

import re
from pathlib import Path

from counted import code_lines

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "src" / "accelerate_core"

#: Lines of code; docstrings, comments and blank lines are not counted.
TOTAL = 9_500  # docs/decisions/031-a-typed-contract.md explains what moved out to stay below it
DEPENDENCIES = {"torch", "pluggy", "packaging", "pydantic", "PyYAML"}


def test_core_stays_within_its_line_budget() -> None:
    lines = sum(code_lines(path) for path in CORE.rglob("*.py"))
    print(f"{lines} of {TOTAL} lines of code")
    assert lines <= TOTAL


def test_core_has_few_and_short_files() -> None:
    paths = list(CORE.rglob("*.py"))
    assert len(paths) <= 100
    assert {p.name: n for p in paths if (n := len(p.read_text().splitlines())) > 500} == {}


def test_core_depends_on_five_libraries() -> None:
    text = (ROOT / "core" / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)\]", text, re.S | re.M)
    assert block is not None
    assert set(re.findall(r'"([A-Za-z]+)', block[1])) == DEPENDENCIES
