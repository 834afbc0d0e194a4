"""Code on other pages and in READMEs: imports exist, and complete programs run as printed."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from dummies import distribution
from warm_python import warm_python

import accelerate_core

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.dist


def blocks(page: str, language: str) -> list[str]:
    """Return the code of one language that a page shows."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def run(folder: Path, *command: str, path: Path | None = None) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    environ = {**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(path or "")}
    done = subprocess.run(
        [warm_python(), *command],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PAGES = [
    path.relative_to(ROOT).as_posix()
    for pattern in ("docs/*.md", "*/*/README.md")
    for path in sorted(ROOT.glob(pattern))
]


@pytest.mark.parametrize("page", PAGES)
def test_names_on_a_page_exist_and_are_imported(page: str) -> None:
    """These blocks are parts of programs, so they are parsed and their imports are checked."""
    imported, used = set(), set()
    for code in blocks(page, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom | ast.Import):
                imported |= {name.asname or name.name for name in node.names}
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("accelerate_"):
                module = importlib.import_module(str(node.module))
                assert [one.name for one in node.names if not hasattr(module, one.name)] == []
            if isinstance(node, ast.Name):
                used.add(node.id)
    ours = {name for name in used - imported if name[0].isupper() and name in dir(accelerate_core)}
    assert ours == set(), "not imported on this page"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", [1, 2])
def test_quickstart_page_runs_as_printed(tmp_path: Path, processes: int) -> None:
    (script,) = blocks("docs/quickstart.md", "python")
    (tmp_path / "train.py").write_text(script)
    launch = ["-m", "accelerate_core", "launch", "--cpu", "--num_processes", str(processes)]
    out = run(tmp_path, *(launch if processes > 1 else []), "train.py")
    found = re.search(r"(\d+) of 400 are right", out)
    assert found is not None, out
    assert int(found[1]) > 380
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.timeout(300)
def test_smallest_backend_passes_its_checks(tmp_path: Path) -> None:
    (code,) = blocks("docs/smallest_backend.md", "python")
    points = tomllib.loads("\n".join(blocks("docs/smallest_backend.md", "toml")))["project"][
        "entry-points"
    ]
    groups = {
        group.removeprefix("accelerate_core."): {n: t.partition(":")[2] for n, t in its.items()}
        for group, its in points.items()
    }
    distribution(tmp_path, "ring", code, groups)
    checks = (
        "selection declarations same_start training gradients_meet branches accumulation learning"
    )
    only = [word for check in checks.split() for word in ("--only", check)]
    command = ["-m", "accelerate_core", "plugins", "check", "ring", "--json", *only]
    result = json.loads(run(tmp_path, *command, path=tmp_path))
    assert result["passed"]
    assert [one["name"] for one in result["checks"] if one["state"] != "passed"] == []
