"""The option `--wheels DIR` for wheels that `make dist` built. Without it, the tests build them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wheels", default=None, help="directory with the built wheels")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A new repository with the current files of this working tree."""

    def git(*arguments: str, cwd: Path = ROOT) -> str:
        return subprocess.check_output(["git", *arguments], cwd=cwd, text=True)

    made = tmp_path / "another folder" / "clone"
    for name in git("ls-files", "-z", "-co", "--exclude-standard").split("\0"):
        if name and (ROOT / name).is_file():
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, made / name)
    git("init", "--quiet", "--initial-branch", "main", cwd=made)
    for key, value in (("user.name", "A tester"), ("user.email", "tester@example.org")):
        git("config", key, value, cwd=made)
    git("add", "--all", cwd=made)
    git("commit", "--quiet", "--message", "Begin", cwd=made)
    return made
