"""The original's commands, run by accelerate-core."""

from __future__ import annotations

import os
import sys
from itertools import takewhile
from pathlib import Path


def default_config() -> Path:
    """Return the config file where none is named: the original's, unless there is ours alone."""
    from accelerate_launch import default_config_path
    from accelerate_launch.paths import peers_config

    theirs, ours = peers_config(os.environ), default_config_path(os.environ)
    return ours if ours.is_file() and not theirs.is_file() else theirs


def call(words: list[str]) -> None:
    """Run a command of accelerate-core with the config file that the original would use.

    Like there `launch --cpu` uses none that it is not told.
    """
    from accelerate_core.cli import cli
    from accelerate_core.config.files import CONFIG_VARIABLE

    options = takewhile(lambda word: word != "-m" and not word.endswith(".py"), words)
    unwanted = words[:1] == ["launch"] and "--cpu" in options
    path, said = default_config(), os.environ.get(CONFIG_VARIABLE)
    if not said and (words[:1] == ["config"] or (path.is_file() and not unwanted)):
        os.environ[CONFIG_VARIABLE] = str(path)
    try:
        cli.main(args=words, prog_name="accelerate")
    finally:
        if not said:
            os.environ.pop(CONFIG_VARIABLE, None)


def run(*command: str) -> None:
    """Run a command of accelerate-core with what this process was given behind its name."""
    call([*command, *sys.argv[1:]])


def main() -> None:
    """`accelerate`: every command."""
    run()
