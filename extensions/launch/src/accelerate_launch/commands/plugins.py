"""`accelerate-core plugins`: show which plugins are installed, which are active, and why."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict

import click

from accelerate_core.plugin import ConfigurationError, console, did_you_mean, installed, listing
from accelerate_launch.cli import Commands
from accelerate_launch.commands.click_options import complete_file
from accelerate_launch.commands.tables import print_table, print_terms
from accelerate_launch.explain.planned_run import planned_run
from accelerate_launch.explain.report import problems, rows
from accelerate_launch.explain.why import Explanation, why
from accelerate_launch.planning import find_config

_STYLES = dict.fromkeys(("broken", "refused", "undecided"), "red")
_STYLES |= {"active": "green", "disabled": "yellow"}
_COLUMNS = ("kind", "name", "state", "distribution", "version", "api_version", "reason")
#: In a terminal narrower than this, the last columns are merged into one.
_WIDE = 120
_BOTH = "reason, distribution (api)"


@click.group("plugins", cls=Commands, prefix="plugins.", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--kind", default=None, help="Only plugins of this kind.")
@click.option("--all", "show_all", is_flag=True, help="Also show plugins that nothing requests.")
@click.option(
    "--config_file",
    metavar="FILE",
    help="Read this config file, as launch would.",
    shell_complete=complete_file,
)
@click.pass_context
def command(
    ctx: click.Context, as_json: bool, kind: str | None, show_all: bool, config_file: str | None
) -> None:
    """Show which plugins are active here, which others are installed, and why.

    Plugins that nothing requests are only named. --all, --kind and --json show them in full.
    """
    if ctx.invoked_subcommand is not None:
        return
    kinds = installed().groups.values()
    if kind is not None and kind not in kinds:
        hint = did_you_mean(kind, kinds)
        raise ConfigurationError(f"--kind {kind!r} is not one of {listing(kinds)}.{hint}")
    environ = dict(os.environ)
    run = planned_run(environ, find_config(config_file, environ))
    everything = show_all or as_json or kind is not None
    made = rows(run, ask_trackers=everything and kind in (None, "tracker"))
    shown = [row for row in made if kind in (None, row["kind"])]
    if as_json:
        click.echo(json.dumps(shown, indent=2))
    else:
        print_rows(
            {**row, "reason": "see the error below"} if row["state"] == "undecided" else row
            for row in shown
            if everything or is_asked_for(row)
        )
        if not everything:
            _print_rest(shown)
    for problem in problems(run):
        click.echo(f"Error: {problem}", err=True)
    if problems(run):
        sys.exit(1)


def is_asked_for(row: Mapping[str, str]) -> bool:
    """Return whether a plugin is active, was a candidate, or could not be used."""
    return row["state"] != "available"


def _print_rest(rows: Iterable[Mapping[str, str]]) -> None:
    """Name the plugins that nothing requests, except commands, which `--help` lists."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if not is_asked_for(row) and row["kind"] != "command":
            names.setdefault(row["kind"], []).append(row["name"])
    if names:
        click.echo("Also installed, but not requested here (--all shows them in full):")
        print_terms((kind, ", ".join(found)) for kind, found in names.items())


def print_rows(rows: Iterable[Mapping[str, str]], title: str | None = None) -> None:
    """Print one line per plugin."""
    styled = ({**row, "state": (row["state"], _STYLES.get(row["state"], ""))} for row in rows)
    columns: tuple[str, ...] = _COLUMNS
    if console().width < _WIDE:
        told = "{reason}\n{distribution} {version} ({api_version})"
        styled = ({**row, _BOTH: told.format(**row).replace("()", "")} for row in styled)
        columns = ("kind", "name", "state", _BOTH)
    cells = ([row[column] for column in columns] for row in styled)
    print_table([column.replace("api_version", "api") for column in columns], cells, title=title)


@click.command("why")
@click.argument("name")
@click.option(
    "--num_processes", type=click.IntRange(min=1), help="Assume a run with this many processes."
)
@click.option(
    "--config_file", metavar="FILE", help="Read this config file.", shell_complete=complete_file
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def why_command(
    name: str, num_processes: int | None, config_file: str | None, as_json: bool
) -> None:
    """Explain step by step why the plugin NAME is active or not.

    The explanation applies to the current environment and configuration. Exits with status 1 if no
    plugin of this kind can be chosen, or if the chosen one cannot be used.
    """
    environ = dict(os.environ)
    # The file that `launch` would use: named here or by the environment, or the default one.
    config = find_config(config_file, environ)
    explanations = why(name, planned_run(environ, config, num_processes))
    if as_json:
        click.echo(json.dumps([asdict(one) for one in explanations], indent=2))
    else:
        for one in explanations:
            _print(one, None if config is None else f"{config.path} (as launch reads it)")
    if any(one.problem for one in explanations):
        sys.exit(1)


def _print(one: Explanation, config: str | None) -> None:
    from rich.padding import Padding
    from rich.text import Text

    out = console()
    head = Text(f"{one.kind} {one.name}: ")
    head.append(one.state, style=_STYLES.get(one.state, "bold"))
    out.print(head.append(f", {one.reason}"))
    print_terms(one.steps)
    last = [] if config is None else [f"config file: {config}"]
    last += [] if one.state == "active" else [f"to use it: {one.advice}"]
    for line in last:
        out.print(Padding(Text(line, overflow="fold"), (0, 0, 0, 2), expand=False))
