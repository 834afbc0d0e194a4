"""A new distribution does not have to be added to any hand-written list."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

PROJECT = """
[project]
name = "accelerate-invented"
version = "0.1.0"
dependencies = ["accelerate-core>=0.1,<1", "accelerate-tracking"]
"""


def run(root: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(root / "trackers/invented/src")}
    return subprocess.run(
        [*map(str, command)], cwd=root, env=environ, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A workspace with links to our distributions, and one more tracker that no file names yet."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    (tmp_path / "core").symlink_to(ROOT / "core")
    for kind in ("backends", "extensions", "trackers"):
        (tmp_path / kind).mkdir()
        for member in (ROOT / kind).glob("*/pyproject.toml"):
            (tmp_path / kind / member.parent.name).symlink_to(member.parent)
    package = tmp_path / "trackers/invented/src/accelerate_invented"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import accelerate_tracking\n")
    (tmp_path / "trackers/invented/pyproject.toml").write_text(PROJECT)
    return tmp_path


def workspace(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = "import sys, workspace, pathlib; workspace.main(sys.argv[1:], pathlib.Path.cwd())"
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True)


def test_new_distribution_joins_the_import_contracts_without_a_hand_written_line(
    root: Path,
) -> None:
    refused = workspace(root, "--check")
    assert refused.returncode == 1
    assert "Run: make format" in refused.stderr
    assert workspace(root).returncode == 0
    assert workspace(root, "--check").returncode == 0
    project = tomllib.loads((root / "trackers/invented/pyproject.toml").read_text())["project"]
    assert project["urls"]["Changelog"].endswith("/trackers/invented/CHANGELOG.md")

    lint = (BIN / "lint-imports", "--no-cache")
    kept = run(root, *lint)
    assert kept.returncode == 0, kept.stdout + kept.stderr
    package = root / "trackers/invented/src/accelerate_invented"
    (package / "__init__.py").write_text("import accelerate_ddp\n")
    broken = run(root, *lint)
    assert broken.returncode == 1
    assert "accelerate_invented is not allowed to import accelerate_ddp" in broken.stdout


def test_ruff_and_mypy_find_a_new_distribution(root: Path) -> None:
    package = root / "trackers/invented/src/accelerate_invented"
    # ruff must sort imports of the package itself into a separate group.
    (package / "values.py").write_text("import torch\n\nimport accelerate_invented\n")
    sorted_imports = run(root, BIN / "ruff", "check", "--select", "I", package / "values.py")
    assert sorted_imports.returncode == 0, sorted_imports.stdout
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    assert package.parent in [path for pattern in patterns for path in root.glob(pattern)]


def test_contracts_follow_the_requirements_that_members_declare() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers, independent = tool["contracts"][:2]
    assert "accelerate_fsdp2" in independent["modules"]
    order = [layer.split(" | ") for layer in layers["layers"]]
    # accelerate-torchft is built on two backends; the drop-in requires accelerate-big-model.
    assert order[0] == ["accelerate_torchft", "accelerate_drop_in"]
    assert order[-1] == ["accelerate_core"]
    assert sorted(name for layer in order for name in layer) == sorted(tool["root_packages"])


def test_every_folder_that_pytest_searches_exists() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert all((ROOT / folder).is_dir() for folder in options["testpaths"])


def test_members_that_require_each_other_are_refused_by_name(root: Path) -> None:
    other = root / "extensions/other"
    (other / "src/accelerate_other").mkdir(parents=True)
    (other / "src/accelerate_other/__init__.py").touch()
    (other / "pyproject.toml").write_text(
        '[project]\nname = "accelerate-other"\ndependencies = ["accelerate-invented"]\n'
    )
    (root / "trackers/invented/pyproject.toml").write_text(
        '[project]\nname = "accelerate-invented"\ndependencies = ["accelerate_other>=1"]\n'
    )
    refused = workspace(root)
    assert refused.returncode == 1
    assert "in a circle: accelerate-invented, accelerate-other" in refused.stderr


def test_test_files_have_unique_names() -> None:
    """pytest imports them by name, so two files with the same name cannot be run together."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
