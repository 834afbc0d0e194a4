"""`accelerate-core plugins`: what is installed, why, the contract, the suite, a new repository."""

from __future__ import annotations

from importlib import import_module

import click

from accelerate_core.cli.plugins.table import print_rows, show
from accelerate_core.errors import did_you_mean, listing

__all__ = ["command", "print_rows"]

#: Sub-command -> module and a line of help; a module is imported when its command runs.
_COMMANDS = {
    "why": ("why", "Tell the whole decision about one plugin."),
    "hooks": ("hooks", "Print the contract: every hook a plugin may implement."),
    "check": ("check", "Run the conformance suite against an installed plugin."),
    "new": ("new", "Write a complete repository for a new plugin."),
}


class PluginCommands(click.Group):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        found = import_module(f"accelerate_core.cli.plugins.{_COMMANDS[name][0]}").command
        return found if isinstance(found, click.Command) else None

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


@click.group("plugins", cls=PluginCommands, invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--kind", default=None, help="Only plugins of this kind.")
@click.option("--config_file", metavar="FILE", help="Decide with this config file, as launch.")
@click.pass_context
def command(ctx: click.Context, as_json: bool, kind: str | None, config_file: str | None) -> None:
    """Show which plugins are installed, which are active in this environment, and why."""
    if ctx.invoked_subcommand is None:
        show(as_json, kind, config_file)
