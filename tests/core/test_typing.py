"""Type checkers flag the mistakes in a script and nothing else, because the public API is typed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from accelerate_testing.scaffold import TEMPLATE_KINDS, write_repository

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "typechecked"
FILES = ("correct.py", "mistakes.py")


def marked() -> set[tuple[str, int]]:
    """Return file and line of each mistake."""
    return {
        (name, number)
        for name in FILES
        for number, line in enumerate((FOLDER / name).read_text().splitlines(), 1)
        if line.endswith("  # mistake")
    }


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 1, done.stdout + done.stderr  # 1 means type errors, not a crash
    return done.stdout


def by_mypy(folder: Path) -> dict[tuple[str, int], str]:
    # The repository's own options and cache: reading torch again takes a minute.
    options = ("--config-file", "pyproject.toml", "--no-error-summary")
    output = run(ROOT, "mypy", *options, *(str(FOLDER / name) for name in FILES))
    found = re.findall(r"^(?:.*/)?(\w+\.py):(\d+): error: (.*)$", output, re.M)
    return {(name, int(line)): text for name, line, text in found}


def by_pyright(folder: Path) -> dict[tuple[str, int], str]:
    options = ("--outputjson", "--pythonpath", sys.executable)
    output = run(folder, "pyright", *options, *(str(FOLDER / name) for name in FILES))
    found = json.loads(output)["generalDiagnostics"]
    return {
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1): one["message"]
        for one in found
        if one["severity"] == "error"
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "checker",
    [
        pytest.param(by_mypy, marks=pytest.mark.needs("mypy"), id="mypy"),
        pytest.param(by_pyright, marks=pytest.mark.needs("pyright"), id="pyright"),
    ],
)
def test_type_checkers_flag_exactly_the_marked_mistakes(
    checker: Callable[[Path], dict[tuple[str, int], str]], pytestconfig: pytest.Config
) -> None:
    assert pytestconfig.cache is not None
    found, wanted = checker(pytestconfig.cache.mkdir("type_checkers")), marked()
    assert len(wanted) > 40
    missed = sorted(wanted - found.keys())
    assert not missed, f"not flagged: {missed}"
    more = {place: found[place] for place in sorted(found.keys() - wanted)}
    assert not more, f"flagged without a mistake: {more}"


@pytest.mark.needs("mypy")
@pytest.mark.timeout(300)
def test_new_repositories_have_no_type_errors(tmp_path: Path) -> None:
    """With our options and cache, because reading torch takes a minute."""
    for kind in TEMPLATE_KINDS:
        write_repository(f"fresh_{kind}", kind, tmp_path / kind)
    sources = [str(tmp_path / kind / "src") for kind in TEMPLATE_KINDS]
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", *sources]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no issues found in 12 source files" in done.stdout
