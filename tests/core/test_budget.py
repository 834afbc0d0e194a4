"""The core is to be tiny: 8,500 lines of code. Until it is, no part of it may grow."""

from __future__ import annotations

import collections
import re
from pathlib import Path

from counted import code_lines

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "src" / "accelerate_core"

#: Part of the core -> (its budget, what it has now at most).
BUDGET = {
    "accelerator": (1500, 1331),
    "prepare": (280, 519),
    "data": (2200, 2042),
    "training": (350, 656),
    "builtin": (350, 449),
    "distributed": (1150, 1094),
    "plugins": (1250, 895),
    "config": (850, 832),
    "contract": (570, 862),
}
#: Where the modules of today belong.
PARTS = {
    "accelerator": r"accelerator|arguments|compatibility|state|utils|delegation|__init__|__main__",
    "prepare": r"prepare",
    "data": r"data",
    "training": r"training",
    "builtin": r"builtin|compilation|profiling|logging",
    "distributed": r"distributed",
    "plugins": r"plugins|cli",
    "config": r"config",
    "contract": r"contract|hookspecs|backend|precision|errors",
}
DEPENDENCIES = {"torch", "pluggy", "packaging", "pydantic", "PyYAML"}


def part_of(path: Path) -> str:
    top = path.relative_to(CORE).parts[0].removesuffix(".py")
    return next(part for part, names in PARTS.items() if re.fullmatch(names, top))


def test_no_part_of_the_core_grows() -> None:
    lines: collections.Counter[str] = collections.Counter()
    for path in CORE.rglob("*.py"):
        lines[part_of(path)] += code_lines(path)
    for part, (budget, now) in BUDGET.items():
        over = f", {lines[part] - budget} over" if lines[part] > budget else ""
        print(f"{part:12} {lines[part]:6} of {budget}{over}; at most {now}")
    print(f"{'sum':12} {lines.total():6} of 8500")
    assert {p: n for p, n in lines.items() if n > BUDGET[p][1]} == {}


def test_files_are_few_and_short() -> None:
    paths = list(CORE.rglob("*.py"))
    assert len(paths) <= 95
    long = {p.name: n for p in paths if (n := len(p.read_text().splitlines())) > 500}
    assert long.keys() <= {"backend.py"}  # 44 hooks, each with what it is asked and its default


def test_the_core_needs_five_libraries() -> None:
    text = (ROOT / "core" / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)\]", text, re.S | re.M)
    assert block is not None
    assert set(re.findall(r'"([A-Za-z]+)', block[1])) == DEPENDENCIES
