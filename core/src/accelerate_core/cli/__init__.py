"""The command line, `accelerate-core`. No `--help` imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import click

from accelerate_core.errors import AccelerateError, did_you_mean, listing

if TYPE_CHECKING:
    from accelerate_core.plugins.discovery import PluginRecord

__all__ = ["cli", "main"]

#: Command -> module and a line of help; a module is imported when its command runs.
_COMMANDS = {
    "config": (
        "config",
        "Set up this machine: a dialogue, or default, set, show, validate, update.",
    ),
    "launch": ("launch", "Start a script in one process or many, on one machine or several."),
    "env": ("env", "Show versions, devices, plugins and the configuration in force."),
    "plugins": ("plugins", "Show which plugins are installed, which are active, and why."),
    "checkpoints": ("checkpoints", "List, verify and show what save_state wrote."),
    "merge-weights": ("merge", "Merge sharded weights into one file."),
    "estimate-memory": ("estimate", "Show the memory a model takes, by dtype and by backend."),
    "runs": ("runs", 'Show the values and curves that log_with="jsonl" has written.'),
    "test": ("test", "Run a short self-check with the options of launch."),
}


class Commands(click.Group):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS, *_of_plugins()]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return _load(name)
        command = import_module(f"accelerate_core.cli.{_COMMANDS[name][0]}").command
        return command if isinstance(command, click.Command) else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = list(_COMMANDS)
        if args and args[0] not in known and not args[0].startswith("-"):
            known += _of_plugins()
        if args and args[0] not in known and not args[0].startswith("-"):
            _say_who_brings(args[0])
            hint = did_you_mean(args[0], known)
            raise click.UsageError(
                f"There is no command {args[0]!r}; there are {listing(known)}.{hint}", ctx
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])
        theirs = _of_plugins()
        if theirs:
            from accelerate_core.plugins.schemas import plugin_schemas

            said = {one.name: one.summary for one in plugin_schemas() if one.kind == "command"}
            with formatter.section("Commands of plugins"):
                formatter.write_dl([(name, said.get(name, "")) for name in theirs])

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except AccelerateError as error:
            raise Mistake(str(error)) from error


def _of_plugins() -> dict[str, PluginRecord]:
    """Return the commands that installed distributions bring; names of ours are not given away."""
    from accelerate_core.plugins.discovery import disabled_names, installed

    off = disabled_names()
    records = [one for one in installed().of_kind("command") if one.name not in off]
    return {one.name: one for one in records if one.name not in _COMMANDS}


def _load(name: str) -> click.Command | None:
    record = _of_plugins().get(name)
    made = record.load() if record is not None else None
    if record is not None and not isinstance(made, click.Command):
        from accelerate_core.errors import PluginError

        raise PluginError(f"The command plugin {record.label} is broken: it is no click.Command.")
    return made


def _say_who_brings(name: str) -> None:
    from accelerate_core.plugins import catalog

    if name in catalog.COMMANDS:
        raise Mistake(
            f"The command {name!r} comes with a plugin that is not installed. "
            f"Install it with: {catalog.pip_command(catalog.COMMANDS[name])}"
        )


class Mistake(click.ClickException):
    """What the user asked for cannot be done: the message alone, and exit status 2."""

    exit_code = 2


def _version(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from accelerate_core import __version__

        click.echo(f"accelerate-core {__version__}")
        ctx.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Run a PyTorch training script on any setup."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    cli.main(
        args=None if arguments is None else list(arguments),
        prog_name="accelerate-core",
        standalone_mode=True,
    )
