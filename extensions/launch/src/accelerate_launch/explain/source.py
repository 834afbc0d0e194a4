"""Read facts about a plugin from its source code, without importing it."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from accelerate_launch.target import find_module

_DEPTH = 5  # how many re-exports and base classes are followed


@dataclass(frozen=True)
class Stated:
    """The facts that could be read. None means unknown without importing the plugin."""

    #: Why the target of the entry point can't exist; "" if it exists or may exist.
    missing: str = ""
    api_version: tuple[int, int] | None = None
    #: Whether it has `explain_choice(sources)`, which returns what the plugin itself chooses and why.
    explains: bool = False


@functools.cache
def stated(target: str) -> Stated:
    """Read the class that an entry point names (`package.module:Class`) from its source."""
    module, _, attribute = target.partition(":")
    try:
        text = _text(find_module(module).origin)
    except (ImportError, ValueError, OSError):
        return Stated(f"there is no module {module!r}")
    if text is None or not attribute or "." in attribute:
        return Stated()
    # The name is in the source, or something creates it dynamically.
    if not re.search(rf"\b{attribute}\b|__getattr__|import \*", text):
        return Stated(f"{module!r} has no {attribute!r}")
    version, explains = None, False
    for statement in _statements(module, attribute, _DEPTH):
        version = version or _stated(statement)
        explains = explains or getattr(statement, "name", "") == "explain_choice"
    return Stated("", version, explains)


def _text(origin: str | None) -> str | None:
    """Return the source of a module, None if it can't be read."""
    if origin is None or not origin.endswith(".py"):
        return None
    try:
        return Path(origin).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def _statements(module: str, name: str, depth: int) -> Iterator[ast.stmt]:
    """Yield the statements of a class and then of its base classes, across modules."""
    try:
        spec = find_module(module)
        tree = ast.parse(_text(spec.origin) or "")
    except (ImportError, ValueError, OSError, SyntaxError):
        return  # importing it will show the error
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            yield from node.body
            for base in node.bases:
                if isinstance(base, ast.Name) and depth:
                    yield from _statements(module, base.id, depth - 1)
            return
        if isinstance(node, ast.ImportFrom) and depth:
            package = module if spec.submodule_search_locations else module.rpartition(".")[0]
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    relative = "." * node.level + (node.module or "")
                    source = importlib.util.resolve_name(relative, package)
                    yield from _statements(source, alias.name, depth - 1)
                    return


def _stated(statement: ast.stmt) -> tuple[int, int] | None:
    """Return the version that a statement assigns to `api_version`, None for other statements."""
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    if not any(isinstance(one, ast.Name) and one.id == "api_version" for one in targets):
        return None
    try:
        major, minor = ast.literal_eval(statement.value)  # type: ignore[attr-defined]
        return int(major), int(minor)
    except (ValueError, TypeError):
        return None
