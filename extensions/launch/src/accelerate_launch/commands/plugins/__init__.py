"""`accelerate-core plugins`: what is installed, what is active, and why."""

from __future__ import annotations

import click

from accelerate_core.cli import Commands
from accelerate_launch.commands.plugins.table import print_rows, show


@click.group("plugins", cls=Commands, prefix="plugins.", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--kind", default=None, help="Only plugins of this kind.")
@click.option("--config_file", metavar="FILE", help="Decide with this config file, as launch.")
@click.pass_context
def command(ctx: click.Context, as_json: bool, kind: str | None, config_file: str | None) -> None:
    """Show which plugins are installed, which are active in this environment, and why."""
    if ctx.invoked_subcommand is None:
        show(as_json, kind, config_file)
