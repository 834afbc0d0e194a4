"""The command line, `accelerate-core`. No `--help` imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import click

from accelerate_core.errors import AccelerateError, did_you_mean, listing

__all__ = ["cli", "main"]

#: Command -> module and a line of help; a module is imported when its command runs.
_COMMANDS = {
    "launch": ("launch", "Start a script in one process or many, on one machine or several."),
    "env": ("env", "Show versions, devices, plugins and the configuration in force."),
    "plugins": ("plugins", "Show which plugins are installed, which are active, and why."),
    "checkpoints": ("checkpoints", "List, verify and show what save_state wrote."),
    "merge-weights": ("merge", "Merge sharded weights into one file."),
    "runs": ("runs", 'Show the values and curves that log_with="jsonl" has written.'),
    "test": ("test", "Run a short self-check with the options of launch."),
}


class Commands(click.Group):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        command = import_module(f"accelerate_core.cli.{_COMMANDS[name][0]}").command
        return command if isinstance(command, click.Command) else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            hint = did_you_mean(args[0], _COMMANDS)
            raise click.UsageError(
                f"There is no command {args[0]!r}; there are {listing(_COMMANDS)}.{hint}", ctx
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except AccelerateError as error:
            raise Mistake(str(error)) from error


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
