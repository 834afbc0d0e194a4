"""How the commands print tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from accelerate_core.builtin.console import console


def print_table(
    columns: Sequence[str],
    rows: Iterable[Iterable[object]],
    *,
    title: str | None = None,
    stderr: bool = False,
) -> None:
    """Print rows of cells; a cell is a value, or a pair of a text and its style.

    What is too wide for the terminal is folded, never cut.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table
    from rich.text import Text

    heads = (Column(name, overflow="fold") for name in columns)
    table = Table(*heads, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        pairs = (cell if isinstance(cell, tuple) else (str(cell), "") for cell in row)
        table.add_row(*(Text(text, style, overflow="fold") for text, style in pairs))
    out = console(stderr=stderr)
    if title:  # as the table's own it would be folded to the table's width
        out.print(Text(title, "italic", overflow="fold"))
    out.print(table)


def print_terms(rows: Iterable[tuple[str, str]]) -> None:
    """Print pairs of a term and what is said about it, indented."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row("", *(Text(text, overflow="fold") for text in row))
    console().print(table)
