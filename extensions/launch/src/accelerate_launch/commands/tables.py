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
    """Print rows of cells; a cell is a value, or a pair of a text and its style."""
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        pairs = (cell if isinstance(cell, tuple) else (str(cell), "") for cell in row)
        table.add_row(*(Text(text, style, overflow="fold") for text, style in pairs))
    console(stderr=stderr).print(table)
