"""The command `accelerate-core`. Every subcommand is a plugin, and no `--help` imports torch.

A command is a `click.Command` with an entry point in the group `accelerate_core.commands`. The entry
point `GROUP.NAME` adds a subcommand to the command GROUP.
"""

from __future__ import annotations

from typing import Any

import click

from accelerate_core import __version__
from accelerate_core.plugin import (
    AccelerateError,
    did_you_mean,
    disabled_names,
    find,
    installed,
    listing,
)
from accelerate_core.plugins import catalog
from accelerate_launch.commands import completion

#: The kinds of plugins for which the help lists packages that are not installed.
_LISTED_KINDS = ("command", "backend", "precision", "tracker")


class UserError(click.ClickException):
    """A request that cannot be fulfilled: prints only the message and exits with status 2."""

    exit_code = 2


class Commands(click.Group):
    """A group of commands from entry points, each imported only when it is used.

    Commands that belong to the command line itself are added with `add_command`, as in any group.

    Args:
        prefix: how the names of the entry points begin: "" for top-level commands, `plugins.` for
            the subcommands of `plugins`.
    """

    def __init__(self, *args: Any, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prefix = prefix

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = {one.name for one in installed().of_kind("command")} - disabled_names()
        mine = (name.removeprefix(self.prefix) for name in names if name.startswith(self.prefix))
        return sorted({*self.commands, *(name for name in mine if "." not in name)})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in self.commands:
            return self.commands[name]
        if name not in self.list_commands(ctx):
            return None
        record = find("command", self.prefix + name, source="the command line")
        made = record.load()
        if not isinstance(made, click.Command):
            raise record.broken("it is not a click.Command")
        return made

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            extra = catalog.extra_for("command", self.prefix + args[0])
            if extra is not None:
                raise UserError(
                    f"The command {args[0]!r} comes with a plugin that is not installed. "
                    f"Install it with: {catalog.pip_command(extra)}"
                )
            raise click.UsageError(
                f"There is no command {args[0]!r}. The commands are {listing(known)}."
                f"{did_you_mean(args[0], known)}",
                ctx,
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # A third-party command isn't imported for its summary, because that may import torch.
        rows = [
            (name, catalog.SUMMARIES.get(one.name, f"from {one.distribution} {one.version}"))
            for name in self.list_commands(ctx)
            for one in installed().of_kind("command")
            if one.name == self.prefix + name
        ]
        rows += [(name, own.get_short_help_str(100)) for name, own in self.commands.items()]
        rows.sort()
        with formatter.section("Commands"):
            formatter.write_dl(rows)
        missing = self._not_installed()
        if missing:
            with formatter.section(f"Not installed (add with {catalog.pip_command('NAME')})"):
                formatter.write_dl(missing)

    def _not_installed(self) -> list[tuple[str, str]]:
        """Return, for each kind, the plugins that our packages would add.

        If the pip extra has another name, it follows in brackets.
        """
        rows = []
        # A group of commands lists only its own subcommands.
        for kind in ("command",) if self.prefix else _LISTED_KINDS:
            known = catalog.known_names(kind)
            here = {one.name for one in installed().of_kind(kind)}
            extras_here = {known.get(name) for name in here}
            prefix = self.prefix if kind == "command" else ""
            names = []
            for name, extra in known.items():
                own = name.removeprefix(prefix)
                if extra in extras_here or not name.startswith(prefix) or "." in own:
                    continue
                names.append(own if own == extra else f"{own} [{extra}]")
            if names:
                rows.append((f"{kind}s", ", ".join(names)))
        return rows

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except AccelerateError as error:
            raise UserError(str(error)) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="accelerate-core %(version)s")
def cli() -> None:
    """Run a PyTorch training script on any setup."""


cli.add_command(completion.command)
