"""Write `names.json`, the names of Accelerate's modules: `python read_names.py FOLDER_OF_THE_PACKAGE`.

The names are read from the source, without importing it. They are the names that each module defines or
imports from another module of Accelerate.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

TABLE = Path(__file__).parents[2] / "extensions/drop_in/src/accelerate_drop_in/names.json"
#: Modules that no library imports: the questions of `config`, and Accelerate's own tests.
LEFT_OUT = (
    *("commands.menu", "test_utils.scripts"),
    *(f"commands.config.{name}" for name in ("cluster", "config", "default", "sagemaker")),
    *("commands.config.config_utils", "commands.config.update"),
)


def names_of(path: Path) -> list[str]:
    """Return the public names that a module defines or imports from another module of Accelerate."""
    found: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            home = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            modules = {each.stem for each in home.glob("*.py")}
            found.update(one.asname or one.name for one in node.names if one.name not in modules)
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("accelerate"):
            found.update(one.name for one in node.names)
    for node in tree.body:
        bodies = [node, *getattr(node, "body", []), *getattr(node, "orelse", [])]
        for each in bodies if isinstance(node, (ast.If, ast.Try)) else [node]:
            if isinstance(each, (ast.FunctionDef, ast.ClassDef)):
                found.add(each.name)
            elif isinstance(each, (ast.Assign, ast.AnnAssign)):
                targets = each.targets if isinstance(each, ast.Assign) else [each.target]
                every = [each for one in targets for each in getattr(one, "elts", [one])]
                found.update(one.id for one in every if isinstance(one, ast.Name))
    return sorted(name for name in found if not name.startswith("_") and name != "logger")


def main(package: Path) -> None:
    table = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        if not f"{module}.".startswith(tuple(f"{one}." for one in LEFT_OUT)):
            table[module] = names_of(path)
    TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
