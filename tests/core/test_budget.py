"""The core is tiny: 8,500 lines of code in short files, and five dependencies."""

from __future__ import annotations

import collections
import re
from pathlib import Path

from counted import code_lines

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "src" / "accelerate_core"

#: Part of the core -> its budget in the design, and its limit. What the facade had of the step and of
#: preparing stands in `training` and `prepare` now, and the contract has grown: they are over, others
#: are under, and all together stay under `TOTAL`.
LIMITS = {
    "accelerator": (1500, 1340),
    "prepare": (280, 570),
    "data": (2200, 1970),
    "training": (350, 640),
    "builtin": (350, 370),
    "distributed": (1150, 1130),
    "plugins": (1250, 880),
    "config": (850, 850),
    "contract": (570, 880),
}
TOTAL = 8500
#: Where the modules of today belong.
PARTS = {
    "accelerator": r"accelerator|state|utils|delegation|__init__|__main__",
    "prepare": r"prepare",
    "data": r"data",
    "training": r"training",
    "builtin": r"builtin|logging",
    "distributed": r"distributed",
    "plugins": r"plugins|cli",
    "config": r"config|truth",
    "contract": r"contract|backend|errors",
}
DEPENDENCIES = {"torch", "pluggy", "packaging", "pydantic", "PyYAML"}


def part_of(path: Path) -> str:
    top = path.relative_to(CORE).parts[0].removesuffix(".py")
    return next(part for part, names in PARTS.items() if re.fullmatch(names, top))


def test_the_core_is_tiny() -> None:
    lines: collections.Counter[str] = collections.Counter()
    for path in CORE.rglob("*.py"):
        lines[part_of(path)] += code_lines(path)
    for part, (budget, limit) in LIMITS.items():
        over = f", {lines[part] - budget} over" if lines[part] > budget else ""
        print(f"{part:12} {lines[part]:6} of {budget}{over}; at most {limit}")
    print(f"{'sum':12} {lines.total():6} of {TOTAL}")
    assert {part: count for part, count in lines.items() if count > LIMITS[part][1]} == {}
    assert lines.total() <= TOTAL


def test_files_are_few_and_short() -> None:
    paths = list(CORE.rglob("*.py"))
    assert len(paths) <= 95
    assert {p.name: n for p in paths if (n := len(p.read_text().splitlines())) > 500} == {}


def test_the_core_needs_five_libraries() -> None:
    text = (ROOT / "core" / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)\]", text, re.S | re.M)
    assert block is not None
    assert set(re.findall(r'"([A-Za-z]+)', block[1])) == DEPENDENCIES
