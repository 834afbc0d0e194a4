"""The table of `accelerate-core plugins`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import click

from accelerate_core.builtin.console import console
from accelerate_core.errors import ConfigurationError, did_you_mean, listing

STYLES = {
    "active": "green",
    "broken": "red",
    "refused": "red",
    "disabled": "yellow",
    "undecided": "red",
}
_COLUMNS = ("kind", "name", "state", "distribution", "version", "api_version", "because")


def show(as_json: bool, kind: str | None = None, config_file: str | None = None) -> None:
    """Print one line per installed plugin, and what is wrong; leave with 1 if something is.

    Raises:
        ConfigurationError: there is no such kind.
    """
    from accelerate_core.plugins.discovery import GROUPS
    from accelerate_launch.explain.planned_run import planned_run
    from accelerate_launch.explain.report import problems, rows
    from accelerate_launch.planning import find_config

    if kind is not None and kind not in GROUPS.values():
        hint = did_you_mean(kind, GROUPS.values())
        raise ConfigurationError(f"--kind {kind!r} is not one of {listing(GROUPS.values())}.{hint}")
    environ = dict(os.environ)
    run = planned_run(environ, find_config(config_file, environ))
    made = rows(run, ask_trackers=kind in (None, "tracker"))
    shown = [row.as_dict() for row in made if kind in (None, row.kind)]
    if as_json:
        click.echo(json.dumps(shown, indent=2))
    else:
        print_rows(shown)
    for problem in problems(run):
        click.echo(f"Error: {problem}", err=True)
    if problems(run):
        sys.exit(1)


def print_rows(rows: Iterable[Mapping[str, Any]], title: str | None = None) -> None:
    """Print one line per plugin."""
    from rich.table import Table
    from rich.text import Text

    table = Table(*(column.replace("api_version", "api") for column in _COLUMNS), title=title)
    table.title_justify = "left"
    for row in rows:
        cells = [Text(str(row[column]), overflow="fold") for column in _COLUMNS]
        cells[_COLUMNS.index("state")].stylize(STYLES.get(row["state"], ""))
        table.add_row(*cells)
    console().print(table)
