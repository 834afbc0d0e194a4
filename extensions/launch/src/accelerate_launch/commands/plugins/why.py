"""`accelerate-core plugins why NAME`."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import click

from accelerate_core.builtin.console import console
from accelerate_launch.commands.plugins.table import STYLES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accelerate_core.config.files import ConfigFile
    from accelerate_launch.explain.why import Decision

__all__ = ["command"]


@click.command("why")
@click.argument("name")
@click.option("--num_processes", type=click.IntRange(min=1), help="Decide as in a run of so many.")
@click.option("--config_file", metavar="FILE", help="Decide with this config file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def command(name: str, num_processes: int | None, config_file: str | None, as_json: bool) -> None:
    """Tell the whole decision about the plugin NAME, for this environment and configuration.

    Exits with 1, as the table does, if nothing of its kind can be chosen here.
    """
    from accelerate_launch.explain.why import why
    from accelerate_launch.outlook import outlook
    from accelerate_launch.resolve import find_config

    environ = dict(os.environ)
    # What `launch` would hand on: a file named here or by the environment, or the default one.
    config = find_config(config_file, environ)
    decisions = why(name, outlook(environ, config, num_processes))
    if as_json:
        click.echo(json.dumps([decision.as_dict() for decision in decisions], indent=2))
    else:
        _print(decisions, config)
    if any(decision.problem for decision in decisions):
        sys.exit(1)


def _print(decisions: Sequence[Decision], config: ConfigFile | None) -> None:
    from rich.table import Table
    from rich.text import Text

    out = console()
    for decision in decisions:
        head = Text(f"{decision.kind} {decision.name}: ")
        head.append(decision.state, style=STYLES.get(decision.state, "bold"))
        out.print(head.append(f", {decision.because}"))
        table = Table.grid(padding=(0, 2))
        for what, said in decision.steps:
            table.add_row(Text(f"  {what}"), Text(said, overflow="fold"))
        out.print(table)
        if config is not None:
            out.print(Text(f"  config file: {config.path} (as launch reads it)"))
        if decision.state != "active":
            out.print(Text(f"  to have it: {decision.advice}"))
