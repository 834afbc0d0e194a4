"""Print tables on a terminal or into a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from accelerate_core.plugin import console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: The width of a table without a terminal. Longer words are not broken.
_WIDTH = 120


def print_table(
    columns: Sequence[str],
    rows: Iterable[Iterable[object]],
    *,
    title: str | None = None,
    stderr: bool = False,
    names_whole: bool = False,
) -> None:
    """Print rows of cells. A cell is a value, or a pair of a text and its style.

    Cells that are too wide are wrapped, never cut. In a pipe, they are wrapped only at spaces, and
    lines have no trailing spaces.

    Args:
        names_whole: keep each cell of the first column on one line.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table
    from rich.text import Text

    out = console(stderr=stderr)
    texts = [
        [cell if isinstance(cell, tuple) else (shown(cell), "") for cell in row] for row in rows
    ]
    heads = []
    for number, name in enumerate(columns):
        words = [word for row in texts for word in row[number][0].split()]
        heads.append(
            Column(
                name,
                overflow="fold",
                no_wrap=names_whole and number == 0,
                min_width=None if out.is_terminal else max(map(len, [*words, name])),
            )
        )
    table = Table(*heads, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in texts:
        table.add_row(*(Text(text, style, overflow="fold") for text, style in row))
    if title:  # rich would wrap a table's own title to the width of the table
        out.print(Text(title, "italic", overflow="fold"))
    _print(out, table, _WIDTH)


def shown(value: object) -> str:
    """Format a value, with `none`, `true` and `false` as in a config file."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def print_terms(rows: Iterable[tuple[str, str]]) -> None:
    """Print indented pairs of a term and its description."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row("", *(Text(text, overflow="fold") for text in row))
    _print(console(), table, None)


def _print(out: Console, table: Table, width: int | None) -> None:
    """Print a table. In a pipe, lines are at most `width` long and have no trailing spaces."""
    if out.is_terminal:
        out.print(table)
        return
    with out.capture() as captured:
        out.print(table, width=width)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    out.file.write("\n".join([*lines, ""]))
