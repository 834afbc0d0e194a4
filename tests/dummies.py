"""Temporary distributions: a package and its metadata in a folder for `PYTHONPATH`."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import pool

BACKEND = """
from accelerate_core import Backend, Claim

class {cls}(Backend):
    name = "{name}"
    api_version = {api}
    reduces_gradients = "never"

    @classmethod
    def detect(cls, request):
        return Claim({priority}, "{name} wants it")
"""


def distribution(
    root: Path, name: str, code: str, groups: dict[str, dict[str, str]], version: str = "1.0"
) -> str:
    """Write the package `dummy_<name>` and its metadata. Return the name of the package."""
    package = f"dummy_{name}"
    (root / package).mkdir(parents=True)
    (root / package / "__init__.py").write_text(textwrap.dedent(code))
    info = root / f"{package}-{version}.dist-info"
    info.mkdir()
    project = package.replace("_", "-")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n")
    lines = []
    for group, points in groups.items():
        lines.append(f"[accelerate_core.{group}]")
        lines += [f"{point} = {package}:{target}" for point, target in points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return package


def backend(
    root: Path,
    name: str,
    *,
    triggers: tuple[str, ...] = (),
    priority: int = 50,
    api: str = "(1, 0)",
    extra: str = "",
) -> str:
    """Write a backend plugin that always claims the run."""
    code = BACKEND.format(cls="Plugin", name=name, api=api, priority=priority) + extra
    groups = {"backends": {name: "Plugin"}}
    if triggers:
        groups["triggers"] = dict.fromkeys(triggers, "Plugin")
    return distribution(root, name, code, groups)


def run(root: Path, code: str, env: dict[str, str] | None = None, timeout: int = 120) -> Any:
    """Run code in a process that can import the dummies. Return the value it passes to `out`."""
    prelude = "import json, os, sys\ndef out(value): print('RESULT' + json.dumps(value))\n"
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    environ = {**clean, "PYTHONPATH": str(root), **(env or {})}
    done = pool.run(["-c", prelude + textwrap.dedent(code)], environ, timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [line[6:] for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert len(results) == 1, done.stdout
    return json.loads(results[0])
