"""`accelerate launch`, from the command line and from programs that launch with it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from accelerate_core.cli import cli
from accelerate_drop_in.commands import run


def main() -> None:
    """Run `accelerate-core launch`."""
    run("launch")


class _Parser(argparse.ArgumentParser):
    """Keeps what it is given: options and script are those of `accelerate-core launch`."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        made = namespace if namespace is not None else argparse.Namespace()
        made.arguments = [*(sys.argv[1:] if args is None else args)]
        return made, []


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return a parser of the arguments of `launch`, for `launch_command`."""
    if subparsers is not None:
        subparsers.add_parser("launch").set_defaults(func=launch_command)
    return _Parser("accelerate launch", add_help=False)


def launch_command(args: argparse.Namespace) -> None:
    """Launch what `launch_command_parser` was given.

    Raises:
        SystemExit: with the launch's status, if it failed.
    """
    try:
        cli.main(args=["launch", *args.arguments], prog_name="accelerate")
    except SystemExit as end:
        if end.code:
            raise
