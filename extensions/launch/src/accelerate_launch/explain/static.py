"""What a plugin's source says about it, read without importing anything."""

from __future__ import annotations

import ast
import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

_DEPTH = 5  # re-exports that are followed


@dataclass(frozen=True)
class Stated:
    """What could be read; None stands for "cannot be told without importing it"."""

    #: Why the target of the entry point cannot be there; "" if it is, or may be.
    missing: str = ""
    api_version: tuple[int, int] | None = None


@functools.cache
def stated(target: str) -> Stated:
    """Read the class an entry point names (`package.module:Class`) from its source."""
    module, _, attribute = target.partition(":")
    try:
        path = _source(module)
    except (ImportError, ValueError, OSError):
        return Stated(f"there is no module {module!r}")
    if path is None:
        return Stated()
    if not attribute or "." in attribute:
        return Stated()
    found, version = _look(module, path, attribute, _DEPTH)
    return Stated("" if found else f"{module!r} has no {attribute!r}", version)


def _source(module: str) -> Path | None:
    """Return the file of a module; None if it is no source file.

    Raises:
        ImportError: there is no such module.
    """
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        raise ImportError(module)
    if not rest:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    for folder in spec.submodule_search_locations or ():
        below = Path(folder, *rest)
        for path in (below.with_suffix(".py"), below / "__init__.py"):
            if path.is_file():
                return path
        if list(below.parent.glob(f"{below.name}.*")):
            return None  # compiled
    raise ImportError(module)


def _look(module: str, path: Path, name: str, depth: int) -> tuple[bool, tuple[int, int] | None]:
    """Return whether a module can have a name, and the version its class states."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return True, None  # importing it will say
    body = _flat(tree.body)
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    if name in classes:
        return True, _version(classes[name], classes, depth)
    dynamic = False
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return True, None
        dynamic |= isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(one, ast.Name) and one.id == name for one in targets):
                return True, None
        if isinstance(node, ast.Import) and any((a.asname or a.name) == name for a in node.names):
            return True, None
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                dynamic |= alias.name == "*"
                if (alias.asname or alias.name) == name:
                    return True, _elsewhere(module, path, node, alias.name, depth)
    return dynamic, None


def _flat(nodes: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a module, those inside of `if` and `try` too."""
    found: list[ast.stmt] = []
    for node in nodes:
        found.append(node)
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                found += _flat(getattr(node, part, []))
    return found


def _elsewhere(
    module: str, path: Path, node: ast.ImportFrom, name: str, depth: int
) -> tuple[int, int] | None:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for _ in range(node.level - 1):
        package = package.rpartition(".")[0]
    source = node.module or ""
    if node.level:
        source = f"{package}.{source}".rstrip(".")
    if depth == 0 or source.split(".")[0] != module.split(".")[0]:
        return None
    try:
        there = _source(source)
    except (ImportError, ValueError, OSError):
        return None
    return None if there is None else _look(source, there, name, depth - 1)[1]


def _version(
    node: ast.ClassDef, classes: dict[str, ast.ClassDef], depth: int
) -> tuple[int, int] | None:
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            names = [one.id for one in statement.targets if isinstance(one, ast.Name)]
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names = [statement.target.id]
        else:
            continue
        if "api_version" in names and statement.value is not None:
            try:
                major, minor = ast.literal_eval(statement.value)
                return int(major), int(minor)
            except (ValueError, TypeError):
                return None
    for base in node.bases:
        if depth and isinstance(base, ast.Name) and base.id in classes:
            return _version(classes[base.id], classes, depth - 1)
    return None
