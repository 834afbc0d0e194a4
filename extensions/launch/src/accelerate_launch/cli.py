"""The command line, `accelerate-core`: every command is a plugin. No `--help` imports torch.

A command is an entry point of the group `accelerate_core.commands` and a `click.Command`; the command
`GROUP.NAME` is a subcommand of another one.
"""

from __future__ import annotations

from typing import Any

import click

from accelerate_core import __version__
from accelerate_core.errors import AccelerateError, did_you_mean, listing
from accelerate_core.plugins import catalog
from accelerate_core.plugins.discovery import disabled_names, find, installed

#: What the help lists of the packages that are not installed.
_LISTED_KINDS = ("command", "backend", "precision", "tracker")


class Mistake(click.ClickException):
    """What the user asked for cannot be done: the message alone, and exit status 2."""

    exit_code = 2


class Commands(click.Group):
    """A group whose commands are entry points, imported when they are used.

    Args:
        prefix: of their names: "" for the commands themselves, `plugins.` for those of `plugins`.
    """

    def __init__(self, *args: Any, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prefix = prefix

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = {one.name for one in installed().of_kind("command")} - disabled_names()
        mine = (name.removeprefix(self.prefix) for name in names if name.startswith(self.prefix))
        return sorted(name for name in mine if "." not in name)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(ctx):
            return None
        record = find("command", self.prefix + name, source="the command line")
        made = record.load()
        if not isinstance(made, click.Command):
            raise record.broken("it is no click.Command")
        return made

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            extra = catalog.extra_for("command", self.prefix + args[0])
            if extra is not None:
                raise Mistake(
                    f"The command {args[0]!r} comes with a plugin that is not installed. "
                    f"Install it with: {catalog.pip_command(extra)}"
                )
            raise click.UsageError(
                f"There is no command {args[0]!r}; there are {listing(known)}."
                f"{did_you_mean(args[0], known)}",
                ctx,
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # Importing a third-party command may import all there is: what is not known names its owner.
        rows = [
            (name, catalog.SUMMARIES.get(one.name, f"of {one.distribution} {one.version}"))
            for name in self.list_commands(ctx)
            for one in installed().of_kind("command")
            if one.name == self.prefix + name
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
        missing = self._not_installed()
        if missing:
            with formatter.section(f"Not installed; {catalog.pip_command('NAME')} adds them"):
                formatter.write_dl(missing)

    def _not_installed(self) -> list[tuple[str, str]]:
        """Return, for each kind, the names that packages of ours would add.

        A name whose extra is called otherwise has that extra in brackets.
        """
        rows = []
        # Inside a group of commands, only its own commands are of interest.
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
            raise Mistake(str(error)) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="accelerate-core %(version)s")
def cli() -> None:
    """Run a PyTorch training script on any setup."""
