"""The original's commands, run by accelerate-core."""

from __future__ import annotations

import os
import sys
from itertools import takewhile
from pathlib import Path

import yaml


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
    path = Path(os.environ.get(CONFIG_VARIABLE, path))
    before = _text(path)
    try:
        cli.main(args=words, prog_name="accelerate")
    finally:
        if words[:1] == ["config"] and _text(path) != before:
            _let_the_original_read(path)
        if not said:
            os.environ.pop(CONFIG_VARIABLE, None)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _let_the_original_read(path: Path) -> None:
    """Add what the original wants in each file, and what is known here by itself."""
    if path.suffix == ".json":
        return
    text = _text(path)
    found = yaml.safe_load(text)
    if isinstance(found, dict) and "distributed_type" not in found:
        several = int(found.get("num_processes") or 1) > 1
        kind = f"MULTI_{'CPU' if found.get('use_cpu') else 'GPU'}" if several else "NO"
        path.write_text(f"{text.rstrip()}\ndistributed_type: '{kind}'\n", encoding="utf-8")


def run(*command: str) -> None:
    """Run a command of accelerate-core with what this process was given behind its name."""
    call([*command, *sys.argv[1:]])


def main() -> None:
    """`accelerate`: every command."""
    run()
