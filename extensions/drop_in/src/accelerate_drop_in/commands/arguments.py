"""Accelerate's argument parsers, which accept dashes, and a function to run commands with them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from accelerate_core.plugin import AccelerateError


class _Dashes:
    """Adds a spelling with dashes to each option with underscores."""

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        """Add an argument in both spellings."""
        also = [one.replace("_", "-") for one in args if one.startswith("--") and "_" in one]
        return super().add_argument(*args, *also, **kwargs)  # type: ignore[misc]


class CustomArgumentGroup(_Dashes, argparse._ArgumentGroup):
    """A group of a `CustomArgumentParser`."""


class CustomArgumentParser(_Dashes, argparse.ArgumentParser):
    """A parser whose options may be written with dashes or underscores."""

    def add_argument_group(self, *args: Any, **kwargs: Any) -> CustomArgumentGroup:
        """Add a group that accepts both spellings, too."""
        group = CustomArgumentGroup(self, *args, **kwargs)
        self._action_groups.append(group)
        return group


class CustomHelpFormatter(argparse.HelpFormatter):
    """Accelerate's help formatter. Unlike Accelerate's, it hides no options."""


def run_own(
    parser: argparse.ArgumentParser, command: Callable[[Any], object], words: list[str]
) -> None:
    """Run a command of the drop-in. An error is printed as one line, and the exit status is 1."""
    args = parser.parse_args(words)
    try:
        command(args)
    except (AccelerateError, OSError, ValueError) as error:
        sys.exit(f"Error: {error}")
