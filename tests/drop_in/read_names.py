"""Write the names of Accelerate's modules: `python read_names.py FOLDER_OF_THE_PACKAGE`.

They are read from the source, without importing it. `names.json` has the names that each module defines or
imports from another module of Accelerate, `imports.json` what it imports from elsewhere, and `calls.json`
which of these names its own functions use, so that replacing them changes what Accelerate does.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "extensions/drop_in/src/accelerate_drop_in"
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


def top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is imported."""
    statements = list(tree.body)
    while statements:
        node = statements.pop(0)
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            handled = [each for one in getattr(node, "handlers", []) for each in one.body]
            statements[:0] = [*node.body, *node.orelse, *handled]


def imports_of(path: Path) -> dict[str, str]:
    """Return the names that a module imports from outside Accelerate, as `module` or `module:name`."""
    found: dict[str, str] = {}
    for node in top_level(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for one in node.names:
                root = one.name.partition(".")[0]
                found[one.asname or root] = one.name if one.asname else root
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.update(
                {one.asname or one.name: f"{node.module}:{one.name}" for one in node.names}
            )
    return {
        name: where
        for name, where in sorted(found.items())
        if not where.startswith(("accelerate.", "accelerate:", "__future__"))
    }


def calls_of(path: Path, names: Iterable[str]) -> list[str]:
    """Return which names, and which private functions of the module, its functions use."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)]
    private = {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}
    inside = (each for one in functions for statement in one.body for each in ast.walk(statement))
    used = {one.id for one in inside if isinstance(one, ast.Name)}
    return sorted(used & {*names, *private})


def main(package: Path) -> None:
    tables: dict[str, dict[str, Any]] = {"names": {}, "imports": {}, "calls": {}}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        if not f"{module}.".startswith(tuple(f"{one}." for one in LEFT_OUT)):
            names = tables["names"][module] = names_of(path)
            tables["imports"][module] = imports_of(path)
            tables["calls"][module] = calls_of(path, names)
    for name, table in tables.items():
        text = json.dumps(table, indent=1 if name == "names" else None, sort_keys=True)
        (FOLDER / f"{name}.json").write_text(
            text.replace("}, ", "},\n").replace("], ", "],\n") + "\n"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
