"""How the commands print tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from accelerate_core.builtin.console import console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: Columns of a table where there is no terminal; a longer word is left whole.
_WIDTH = 120


def print_table(
    columns: Sequence[str],
    rows: Iterable[Iterable[object]],
    *,
    title: str | None = None,
    stderr: bool = False,
    names_whole: bool = False,
) -> None:
    """Print rows of cells; a cell is a value, or a pair of a text and its style.

    What is too wide is folded, never cut. In a pipe only spaces are folded at, and lines end
    without blanks.

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
    if title:  # as the table's own it would be folded to the table's width
        out.print(Text(title, "italic", overflow="fold"))
    _print(out, table, _WIDTH)


def shown(value: object) -> str:
    """Return a value as a config file has it: `none`, `true`, `false`."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def print_terms(rows: Iterable[tuple[str, str]]) -> None:
    """Print pairs of a term and what is said about it, indented."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row("", *(Text(text, overflow="fold") for text in row))
    _print(console(), table, None)


def _print(out: Console, table: Table, width: int | None) -> None:
    """Print a table; in a pipe with lines of at most `width` that do not end with blanks."""
    if out.is_terminal:
        out.print(table)
        return
    with out.capture() as captured:
        out.print(table, width=width)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    out.file.write("\n".join([*lines, ""]))
