"""Read the public names that are imported on first use from the stub that type checkers also use."""

from __future__ import annotations

import ast
from pathlib import Path


def read_stub(module_file: str) -> dict[str, str]:
    """Return the names in the stub of a module, each with the module that defines it."""
    stub = Path(module_file).with_suffix(".pyi").read_text(encoding="utf-8")
    return {
        name.name: str(line.module)
        for line in ast.parse(stub).body
        if isinstance(line, ast.ImportFrom)
        for name in line.names
        if name.name != "*"  # what plugins export, for type checkers
    }
