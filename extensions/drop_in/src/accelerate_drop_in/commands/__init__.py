"""The original's commands, run by accelerate-core."""

from __future__ import annotations

import sys


def run(*command: str) -> None:
    """Run a command of accelerate-core with what this process was given behind its name."""
    from accelerate_core.cli import cli

    cli.main(args=[*command, *sys.argv[1:]], prog_name="accelerate")


def main() -> None:
    """`accelerate`: every command."""
    run()
