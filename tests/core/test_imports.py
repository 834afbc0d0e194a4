"""No distribution has an import cycle, including imports in functions and for types."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]


def modules() -> dict[str, Path]:
    """Return all modules of all distributions by their dotted names."""
    found = {}
    sources = [ROOT / "core" / "src"]
    for kind in ("extensions", "backends", "trackers"):
        sources += sorted(ROOT.glob(f"{kind}/*/src"))
    for source in sources:
        for path in source.rglob("*.py"):
            parts = path.relative_to(source).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(tree: ast.AST, known: Mapping[str, object]) -> Iterator[str]:
    """Yield the modules that a file imports at the top, in functions, or only for types."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                yield from [name for name in (below, node.module) if name in known][:1]


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components with more than one module (Kosaraju's algorithm)."""
    finished: list[str] = []
    seen: set[str] = set()

    def visit(name: str, edges: Mapping[str, set[str]], into: list[str]) -> None:
        seen.add(name)
        for other in sorted(edges.get(name, ())):
            if other not in seen:
                visit(other, edges, into)
        into.append(name)

    for name in sorted(graph):
        if name not in seen:
            visit(name, graph, finished)
    reverse: dict[str, set[str]] = {}
    for name, others in graph.items():
        for other in others:
            reverse.setdefault(other, set()).add(name)
    seen.clear()
    components = []
    for name in reversed(finished):
        if name not in seen:
            component: list[str] = []
            visit(name, reverse, component)
            components.append(sorted(component))
    return [component for component in components if len(component) > 1]


def test_no_distribution_has_an_import_cycle() -> None:
    found = modules()
    assert {"accelerate_core", "accelerate_launch", "accelerate_ddp", "accelerate_wandb"} <= set(
        found
    )
    graph = {
        name: set(imported(ast.parse(path.read_text(encoding="utf-8")), found)) - {name}
        for name, path in found.items()
    }
    assert cycles(graph) == []


def test_every_kind_of_import_cycle_is_found() -> None:
    known = dict.fromkeys(("a", "a.b", "a.c", "a.d"))
    source = "from a.d import x\nif TYPE_CHECKING:\n    from a import c\ndef f():\n    import a.b"
    assert set(imported(ast.parse(source), known)) == {"a.b", "a.c", "a.d"}
    graph = {"a.b": {"a.c"}, "a.c": {"a.d"}, "a.d": {"a.c"}, "a": {"a.b"}}
    assert cycles(graph) == [["a.c", "a.d"]]
