"""`accelerate-core launch`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import Any

import click

from accelerate_core.config.provenance import decode
from accelerate_core.config.schema import settings_fields
from accelerate_launch.commands.options import CONTEXT, GroupedCommand, launch_options
from accelerate_launch.commands.tables import print_table
from accelerate_launch.contributed import said_to_plugins
from accelerate_launch.options import Unused
from accelerate_launch.plan import LaunchPlan
from accelerate_launch.planning import find_config, make_plan
from accelerate_launch.start import child_environment, choose_launcher, command_of, start


@click.command(
    "launch",
    cls=GroupedCommand,
    context_settings={**CONTEXT, "allow_interspersed_args": False},
)
@launch_options
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
def command(script: str, arguments: tuple[str, ...], config_file: str | None, **given: Any) -> None:
    """Start SCRIPT in one process or many, on one machine or several.

    Options stand before SCRIPT; what follows it goes to the script untouched.
    One process runs the script directly, more are started by torchrun.
    """
    environ = dict(os.environ)
    plan = make_plan(script, arguments, given, environ, find_config(config_file, environ))
    unused = [one for one in settings_fields(Unused) if given[one.name] is not None]
    used = getattr(choose_launcher(plan), "uses", ()) if unused else ()
    for one in unused:
        if one.name not in used:
            click.echo(f"--{one.name} has no effect: {one.help}.", err=True)
    if given["explain"]:
        print_reasons(plan, environ)
    if given["dry_run"]:
        _print_command(plan, environ)
        return
    start(plan, environ)


def _print_command(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Print the command as a line for the shell, and a table of the variables it gets."""
    click.echo(shlex.join(command_of(plan)))
    origins = {name: because.origin for name, because in plan.because.items()}
    origins |= decode(plan.environment)
    made = sorted(child_environment(plan, environ).items())
    added = [
        (name, text, origins.get(name, "the launcher"))
        for name, text in made
        if environ.get(name) != text
    ]
    if added:
        title = "environment added for the processes"
        print_table(("variable", "value", "from"), added, title=title)
    else:
        click.echo("No environment variables are added.")


def print_reasons(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Print every value and where it came from, to stderr: stdout is the script's."""
    values = {**plan.because, **said_to_plugins(environ), **plan.contributed}
    rows = (
        (name, because.value, because.origin)
        for name, because in values.items()
        if because.value is not None or because.origin != "default"
    )
    print_table(("option", "value", "from"), rows, title="why", stderr=True)
