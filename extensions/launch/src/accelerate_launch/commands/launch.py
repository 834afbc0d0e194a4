"""`accelerate-core launch`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from functools import partial
from typing import Any

import click

from accelerate_core.config.provenance import PROVENANCE_VARIABLE, decode
from accelerate_core.plugin import settings_fields
from accelerate_launch.commands.click_options import (
    CONTEXT,
    TYPED,
    GroupedCommand,
    complete_file,
    launch_options,
)
from accelerate_launch.commands.tables import print_table
from accelerate_launch.contributed import plugin_variables
from accelerate_launch.options import Unused
from accelerate_launch.plan import LaunchPlan
from accelerate_launch.planning import find_config, make_plan
from accelerate_launch.starting import (
    child_environment,
    choose_launcher,
    command_of,
    preview_of,
    start,
)

#: Pairs of a purpose and the arguments for it.
EXAMPLES = (
    ("train on every accelerator of this machine, or in one process", "train.py --lr 0.1"),
    ("two processes on the CPU", "--cpu --num_processes 2 train.py"),
    ("bf16 and sharded parameters", "--mixed_precision bf16 --backend fsdp2 train.py"),
    ("use a file that `accelerate-core config` wrote", "--config_file config.yaml train.py"),
    (
        "the first of two machines with eight accelerators each",
        "--num_machines 2 --machine_rank 0 --main_process_ip node1 --num_processes 16 train.py",
    ),
    ("only show what would be started, and why", "--dry_run --explain train.py"),
)


@click.command(
    "launch",
    cls=GroupedCommand,
    examples=EXAMPLES,
    context_settings={**CONTEXT, "allow_interspersed_args": False},
)
@launch_options
@click.argument("script", metavar="SCRIPT", required=False, shell_complete=complete_file)
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
def command(
    script: str | None, arguments: tuple[str, ...], config_file: str | None, **given: Any
) -> None:
    """Start SCRIPT in one process or many, on one machine or several.

    Options come before SCRIPT. Everything after it is passed to the script unchanged.
    A single process runs the script directly. Several processes are started by torchrun.
    """
    if script is None:
        ctx = click.get_current_context()
        typed = shlex.join([*ctx.meta[TYPED], "train.py"])
        raise click.UsageError(
            "No script was given. Put it after the options, followed by its own arguments:\n\n"
            f"    {ctx.command_path} {typed}"
        )
    environ = dict(os.environ)
    plan = make_plan(script, arguments, given, environ, find_config(config_file, environ))
    unused = [one for one in settings_fields(Unused) if given[one.name] is not None]
    used = getattr(choose_launcher(plan), "uses", ()) if unused else ()
    for one in unused:
        if one.name not in used:
            click.echo(f"--{one.name} {one.help}.", err=True)
    if given["explain"]:
        print_reasons(plan, environ)
    if given["dry_run"]:
        _print_command(plan, environ)
        return
    start(plan, environ)


def _print_command(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Print the command as a line for the shell, and a table of the environment variables it gets.

    A launcher that submits a job prints the job instead.
    """
    preview = preview_of(plan)
    command_line = "" if preview is not None else shlex.join(command_of(plan))
    _check_ranks(plan, environ)
    if preview is not None:
        click.echo(preview, nl=False)
        return
    click.echo(command_line)
    origins = {name: sourced.origin for name, sourced in plan.provenance.items()}
    origins |= decode(plan.environment)
    made = sorted(child_environment(plan, environ).items())
    added = [
        (name, text, origins.get(name, "the launcher"))
        for name, text in made
        if environ.get(name) != text and name != PROVENANCE_VARIABLE
    ]
    if added:
        title = "environment added for the processes"
        print_table(("variable", "value", "from"), added, title=title, names_whole=True)
    else:
        click.echo("No environment variables are added.")


def _check_ranks(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Refuse what the ranks would refuse, and print a warning about what they would ignore."""
    from accelerate_launch.rank_check import check_plan, print_findings

    theirs = child_environment(plan, environ)
    print_findings(partial(check_plan, plan, theirs, choose_launcher(plan)))


def print_reasons(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Print every value and where it came from, on stderr because stdout is for the script."""
    values = {**plan.provenance, **plugin_variables(environ), **plan.contributed}
    rows = (
        (name, sourced.value, sourced.origin)
        for name, sourced in values.items()
        if sourced.value is not None or sourced.origin != "default"
    )
    columns = ("option", "value", "from")
    print_table(columns, rows, title="why", stderr=True, names_whole=True)
