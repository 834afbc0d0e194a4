"""Every mutant, a backend with one fault, fails the check that is registered for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support import run_workers

from accelerate_testing.scaffold import write_repository

FOLDER = Path(__file__).with_name("mutants")
SOURCE = "\n".join(path.read_text() for path in sorted(FOLDER.glob("of_*.py")))
NAMES = re.findall(r"^@caught_by\(\"(\w+)\"\)\nclass (\w+)", SOURCE, re.MULTILINE)
SOUND = [
    (check, f"{name}.{check}")
    for checks, name in re.findall(r"^@passes\(([^)]+)\).*\nclass (\w+)", SOURCE, re.MULTILINE)
    for check in re.findall(r"\w+", checks)
]
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[Any]]]:
    """The results of all mutants on two ranks, from few launches."""
    folder = tmp_path_factory.mktemp("mutants")
    write_repository("sound", "backend", folder / "sound")
    left, found = [name for _, name in NAMES + SOUND], {}
    for _ in range(4):
        run = run_workers(FOLDER / "run.py", 2, [folder / "sound", *left], timeout=500)
        for name in list(left):
            lines = [(rank or {}).get(name) for rank in run.results]
            if None in lines:
                break
            found[name] = lines
            left.remove(name)
        if not left:
            return found
    raise AssertionError(run.story)


def test_table_covers_most_checks() -> None:
    assert len(NAMES) >= 140
    assert len({check for check, _ in NAMES}) >= 40


@pytest.mark.dist
@pytest.mark.parametrize(("check", "name"), NAMES, ids=[name for _, name in NAMES])
def test_mutant_fails_its_check(said: dict[str, list[list[Any]]], check: str, name: str) -> None:
    found = said[name]
    assert {which for which, *_ in found} == {check}
    # A mutant that "began" took its process down, because gloo aborts if ranks call different
    # collectives. The suite reports the check that ran.
    assert {"failed", "began"} & {state for _, state, *_ in found}, found
    # The failure must not come from an error in the mutant itself.
    assert not [error for _, _, error, *_ in found if "required positional argument" in error], (
        found
    )


@pytest.mark.dist
@pytest.mark.parametrize(("check", "name"), SOUND, ids=[name for _, name in SOUND])
def test_unusual_but_correct_backend_passes(
    said: dict[str, list[list[Any]]], check: str, name: str
) -> None:
    assert [line[:3] for line in said[name]] == [[check, "passed", ""]] * 2


@pytest.mark.dist
def test_hooks_to_look_at_include_the_one_with_the_fault(said: dict[str, list[list[Any]]]) -> None:
    wrong = {}
    for _, name in NAMES:
        for _, state, _, attribution, damaged in said[name]:
            looked_at = attribution.partition("hooks to look at: ")[2].split(", ")
            if (
                state == "failed"
                and damaged
                and looked_at != [""]
                and not {*looked_at} & {*damaged}
            ):
                wrong[name] = attribution, damaged
    assert wrong == {}
