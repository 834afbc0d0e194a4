"""`accelerate-core plugins`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import click

from accelerate_core.cli.console import console

__all__ = ["command", "print_rows"]

_STYLES = {"active": "green", "broken": "red", "refused": "red", "disabled": "yellow"}
_COLUMNS = ("kind", "name", "state", "distribution", "version", "api_version", "because")


@click.command("plugins")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(as_json: bool) -> None:
    """Show which plugins are installed, which are active in this environment, and why."""
    from accelerate_core.plugins import report

    rows = [row.as_dict() for row in report(dict(os.environ), ask_trackers=True)]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        print_rows(rows)


def print_rows(rows: Iterable[Mapping[str, Any]], title: str | None = None) -> None:
    """Print one line per plugin."""
    from rich.table import Table
    from rich.text import Text

    table = Table(*(column.replace("api_version", "api") for column in _COLUMNS), title=title)
    table.title_justify = "left"
    for row in rows:
        cells = [Text(str(row[column]), overflow="fold") for column in _COLUMNS]
        cells[_COLUMNS.index("state")].stylize(_STYLES.get(row["state"], ""))
        table.add_row(*cells)
    console().print(table)
