"""Parsers whose options may be written with dashes, and the commands that have one of their own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from accelerate_core.errors import AccelerateError


class _Dashes:
    """Takes options with dashes where they have underscores."""

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        """Add an argument, as argparse does."""
        also = [one.replace("_", "-") for one in args if one.startswith("--") and "_" in one]
        return super().add_argument(*args, *also, **kwargs)  # type: ignore[misc]


class CustomArgumentGroup(_Dashes, argparse._ArgumentGroup):
    """A group of a `CustomArgumentParser`."""


class CustomArgumentParser(_Dashes, argparse.ArgumentParser):
    """A parser whose options may be written with dashes or underscores."""

    def add_argument_group(self, *args: Any, **kwargs: Any) -> CustomArgumentGroup:
        """Add a group of the same kind."""
        group = CustomArgumentGroup(self, *args, **kwargs)
        self._action_groups.append(group)
        return group


class CustomHelpFormatter(argparse.HelpFormatter):
    """The help of a parser; ours hides nothing."""


def run_own(
    parser: argparse.ArgumentParser, command: Callable[[Any], object], words: list[str]
) -> None:
    """Run a command that is the drop-in's own: what is wrong is told in one line, with status 1."""
    args = parser.parse_args(words)
    try:
        command(args)
    except (AccelerateError, OSError, ValueError) as error:
        sys.exit(f"Error: {error}")
