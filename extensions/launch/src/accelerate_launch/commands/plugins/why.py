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
    from accelerate_launch.explain.why import Explanation


@click.command("why")
@click.argument("name")
@click.option("--num_processes", type=click.IntRange(min=1), help="Decide as in a run of so many.")
@click.option("--config_file", metavar="FILE", help="Decide with this config file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def command(name: str, num_processes: int | None, config_file: str | None, as_json: bool) -> None:
    """Tell the whole decision about the plugin NAME, for this environment and configuration.

    Exits with 1, as the table does, if nothing of its kind can be chosen here.
    """
    from accelerate_launch.explain.planned_run import planned_run
    from accelerate_launch.explain.why import why
    from accelerate_launch.planning import find_config

    environ = dict(os.environ)
    # What `launch` would hand on: a file named here or by the environment, or the default one.
    config = find_config(config_file, environ)
    explanations = why(name, planned_run(environ, config, num_processes))
    if as_json:
        click.echo(json.dumps([one.as_dict() for one in explanations], indent=2))
    else:
        _print(explanations, config)
    if any(one.problem for one in explanations):
        sys.exit(1)


def _print(explanations: Sequence[Explanation], config: ConfigFile | None) -> None:
    from rich.table import Table
    from rich.text import Text

    out = console()
    for one in explanations:
        head = Text(f"{one.kind} {one.name}: ")
        head.append(one.state, style=STYLES.get(one.state, "bold"))
        out.print(head.append(f", {one.because}"))
        table = Table.grid(padding=(0, 2))
        for what, said in one.steps:
            table.add_row(Text(f"  {what}"), Text(said, overflow="fold"))
        out.print(table)
        if config is not None:
            out.print(Text(f"  config file: {config.path} (as launch reads it)"))
        if one.state != "active":
            out.print(Text(f"  to have it: {one.advice}"))
