"""Parsers and functions for Accelerate's commands, for programs that run them without a shell.

A parser accepts the options of accelerate-core's command, and passes the arguments on to it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from accelerate_drop_in.commands import call
from accelerate_drop_in.commands.arguments import CustomArgumentGroup as CustomArgumentGroup
from accelerate_drop_in.commands.arguments import CustomArgumentParser as CustomArgumentParser
from accelerate_drop_in.commands.arguments import CustomHelpFormatter as CustomHelpFormatter
from accelerate_drop_in.commands.unused_options import without_unused
from accelerate_launch.cli import cli

#: Accelerate's names for arguments of our commands.
_ALSO = {"script": "training_script", "arguments": "training_script_args"}


class _Parser(argparse.ArgumentParser):
    """Lets our command parse the arguments, and also keeps them in `arguments`.

    Args:
        words: the command.
    """

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(f"accelerate {' '.join(words)}", add_help=False)
        self._words = words

    def _context(self, arguments: Sequence[str]) -> click.Context:
        context = click.Context(cli, info_name="accelerate")
        command: Any = cli
        for word in self._words:
            command = command.get_command(context, word)
        if arguments:
            made: click.Context = command.make_context(word, [*arguments], parent=context)
            return made
        return click.Context(command, parent=context, info_name=word)

    def format_help(self) -> str:
        """Return the help text of our command."""
        return self._context(()).get_help()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        made = namespace if namespace is not None else argparse.Namespace()
        given = [*(sys.argv[1:] if args is None else args)]
        if self._words == ("launch",):
            given = without_unused(given)
        try:
            context = self._context(given)
        except click.ClickException as error:
            self.exit(error.exit_code, f"{error.format_message()}\n")
        for parameter in context.command.get_params(context):
            value = context.params.get(str(parameter.name))
            off = value is None and getattr(parameter, "is_flag", False)
            for name in parameter.opts:
                plain = _ALSO.get(name) or name.lstrip("-").replace("-", "_")
                setattr(made, plain, False if off else value)
        made.arguments = given
        return made, []


def _command(
    *words: str, run: Callable[..., None] | None = None
) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Return the parser of one of our commands, and the function that runs it."""

    def command(args: argparse.Namespace) -> None:
        try:
            call([*words, *args.arguments])
        except SystemExit as end:
            if end.code:
                raise

    def parser(subparsers: Any = None) -> argparse.ArgumentParser:
        made = _Parser(words)
        if subparsers is not None:
            subparsers._name_parser_map[words[-1]] = made
            made.set_defaults(func=run or command)
        return made

    command.__doc__ = f"Run `accelerate {' '.join(words)}` with the arguments of its parser."
    parser.__doc__ = f"Return the argument parser of `accelerate {' '.join(words)}`."
    return parser, command


config_command_parser, config_command = _command("config")


def launch_command(args: argparse.Namespace) -> None:
    """Launch with the arguments of `launch_command_parser`, and wait until the processes end.

    Raises:
        subprocess.CalledProcessError: the launch failed.
    """
    # In a separate process, because launching one process replaces this one by the script.
    command = [sys.executable, "-m", "accelerate_core", "launch", *args.arguments]
    subprocess.run(command, check=True)


launch_command_parser, _ = _command("launch", run=launch_command)
merge_command_parser, merge_command = _command("merge-weights")
test_command_parser, test_command = _command("test")
get_config_parser = config_command_parser


def _sub_parser(word: str) -> Callable[[Any, Any], argparse.ArgumentParser]:
    def add(parser: Any, parents: Any) -> argparse.ArgumentParser:
        made, run = _command("config", word)
        found: argparse.ArgumentParser = made(parser)
        found.set_defaults(func=run)
        return found

    add.__doc__ = f"Add `config {word}` to a command's subparsers. `parents` is ignored."
    return add


default_command_parser = _sub_parser("default")
update_command_parser = _sub_parser("update")
