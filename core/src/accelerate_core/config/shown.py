"""Show values and their sources as a table, in a terminal or a notebook."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any


class Shown:
    """Base class of objects that notebooks and rich (`rich.print`) show as a table."""

    #: Returns the name, value and source for each row.
    _rows: Callable[..., list[tuple[str, str, str]]]

    def _repr_html_(self) -> str:
        lines = [("th", ("", "value", "from")), *(("td", row) for row in self._rows())]
        rows = ("".join(f"<{tag}>{escape(text)}</{tag}>" for text in row) for tag, row in lines)
        name, body = type(self).__name__, "</tr><tr>".join(rows)
        return f"<table><caption>{name}</caption><tr>{body}</tr></table>"

    def __rich__(self) -> Any:
        from rich import table, text  # called by rich, so it is installed

        columns = (table.Column(name, overflow="fold") for name in ("", "value", "from"))
        made = table.Table(*columns, title=type(self).__name__)
        for row in self._rows():
            made.add_row(*map(text.Text, row))
        return made
