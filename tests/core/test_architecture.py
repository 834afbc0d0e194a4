"""The architecture page only names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("core", "backends", "trackers", "extensions", "examples", "tests", "docs")


def test_every_path_on_the_architecture_page_exists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([\w./-]+(?:\.py|\.md|\.pyi|\.json|/))`", page))
    there = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    ends = {f"/{path.relative_to(ROOT).as_posix()}{'/' * path.is_dir()}" for path in there}
    ends |= {f"/{folder}/" for folder in FOLDERS}
    assert len(named) > 30
    assert {name for name in named if not any(end.endswith(f"/{name}") for end in ends)} == set()
