"""A suite tells how far it is, behind what pytest writes or in lines of their own, and no more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import support
from support import clean_environment

SUITE = """
from accelerate_testing import LauncherSuite
class TestSimple(LauncherSuite):
    plugin = "simple"
"""
MAIN = """
import sys
import accelerate_testing.progress as progress
progress.SAY_EVERY = 0.1
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
CHECK = """
import sys
import accelerate_testing.progress as progress
progress.SAY_EVERY = 0.1
from accelerate_core.cli import main
sys.exit(main())
"""
CHOSEN = ["-k", "imports or metadata or one_process"]


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "test_mine.py").write_text(SUITE)
    how = ["-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={tmp_path}"]
    return [sys.executable, "-c", MAIN, *how, *CHOSEN, str(tmp_path / "test_mine.py")]


def on_terminal(command: list[str], folder: Path) -> str:
    return support.on_terminal(command, folder, clean_environment(COLUMNS="100"), 100)


def shown(said: str) -> str:
    """Return what is seen in the end, where each backspace goes one column back."""
    lines = []
    for line in re.sub("\x1b\\[[0-9;]*m", "", said).replace("\r\n", "\n").split("\n"):
        cells: list[str] = []
        at = 0
        for letter in line:
            if letter == "\b":
                at -= 1
                assert at >= 0
                continue
            cells[at : at + 1] = letter
            at += 1
        lines.append("".join(cells).rstrip())
    return "\n".join(lines)


@pytest.mark.dist
@pytest.mark.parametrize("how", [("-q",), ("-v", "-s")], ids=" ".join)
def test_a_terminal_shows_the_check_that_runs_and_nothing_of_it_stays(
    command: list[str], tmp_path: Path, how: tuple[str, ...]
) -> None:
    said = on_terminal([*command, *how], tmp_path)
    assert re.search(r"check [123] of 3, (imports|metadata|one_process), \d+ s", said)
    seen = shown(said)
    assert not re.search(r"check \d of", seen)  # the folder of the tests may be named so, too
    assert "3 passed" in seen
    if how == ("-v", "-s"):
        assert re.search(r"TestSimple::test_imports PASSED$", seen, re.MULTILINE)
    else:
        assert re.search(r"^(.*test_mine\.py )?\.\.\. +\[100%\]$", seen, re.MULTILINE)


@pytest.mark.dist
def test_a_log_has_a_line_now_and_then_and_none_where_it_is_to_be_short(
    command: list[str],
) -> None:
    wanted = {(): True, ("-q",): False, ("-n", "1"): False}
    for how, told in wanted.items():
        done = subprocess.run(
            [*command, *how], env=clean_environment(), capture_output=True, text=True, timeout=90
        )
        assert done.returncode == 0, done.stdout + done.stderr
        lines = re.findall(r"^TestSimple: check \d of 3, \w+, \d+ s$", done.stdout, re.MULTILINE)
        assert bool(lines) is told, done.stdout
        assert "\b" not in done.stdout + done.stderr


@pytest.mark.dist
def test_plugins_check_tells_it_too_and_guesses_what_is_left(tmp_path: Path) -> None:
    words = ["plugins", "check", "simple"]
    done = subprocess.run(
        [sys.executable, "-c", CHECK, *words], env=clean_environment(), capture_output=True,
        text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^simple: check \d+ of \d+, \w+, \d+ s, some \d+ s left$", done.stderr, re.M)
    seen = shown(on_terminal([sys.executable, "-c", CHECK, *words, "--only", "imports"], tmp_path))
    assert "1 passed" in seen
    assert "check 1 of" not in seen
