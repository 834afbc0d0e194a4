"""`accelerate-core launch`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import click

from accelerate_core.builtin.console import console
from accelerate_launch.commands.options import GroupedCommand, launch_options, underscores
from accelerate_launch.plan import LaunchPlan


@click.command(
    "launch",
    cls=GroupedCommand,
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": underscores,
        "max_content_width": 100,
    },
)
@launch_options
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
def command(script: str, arguments: tuple[str, ...], config_file: str | None, **given: Any) -> None:
    """Start SCRIPT in one process or many, on one machine or several.

    Options stand before SCRIPT; what follows it goes to the script untouched.
    One process runs the script directly, more are started by torchrun.
    """
    from accelerate_launch.planning import find_config, make_plan
    from accelerate_launch.start import start

    environ = dict(os.environ)
    plan = make_plan(script, arguments, given, environ, find_config(config_file, environ))
    if given["explain"]:
        print_reasons(plan, environ)
    if given["dry_run"]:
        print_command(plan, environ)
        return
    start(plan, environ)


def print_command(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Print the command as a line for the shell, and a table of the variables it gets."""
    import shlex

    from rich.table import Table
    from rich.text import Text

    from accelerate_core.config.provenance import decode
    from accelerate_launch.start import child_environment, command_of

    click.echo(shlex.join(command_of(plan)))
    origins = decode(plan.environment)
    made = child_environment(plan, environ)
    added = {name: text for name, text in made.items() if environ.get(name) != text}
    table = Table("variable", "value", "from", title="environment added for the processes")
    for name, text in sorted(added.items()):
        table.add_row(name, Text(text, overflow="fold"), Text(_origin(plan, name, origins)))
    if added:
        console().print(table)
    else:
        click.echo("No environment variables are added.")


def _origin(plan: LaunchPlan, name: str, origins: Mapping[str, str]) -> str:
    because = plan.because.get(name)
    return origins.get(name) or (because.origin if because else "the launcher")


def print_reasons(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Print every value and where it came from, to stderr: stdout is the script's."""
    from rich.table import Table
    from rich.text import Text

    from accelerate_launch.contributed import said_by_environment

    table = Table("option", "value", "from", title="why")
    rows = {**plan.because, **said_by_environment(environ), **plan.contributed}
    for name, because in rows.items():
        if because.value is not None or because.origin != "default":
            table.add_row(name, Text(str(because.value)), Text(because.origin))
    console(stderr=True).print(table)
