"""Remove options of `launch` for plugins that the launch does not use.

Accelerate accepts `--fsdp_offload_params true` without `--use_fsdp` and ignores it. `accelerate-core
launch` refuses it. For scripts that were written for Accelerate, it is removed with a warning.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import click

from accelerate_core.config.files import CONFIG_VARIABLE
from accelerate_core.plugin import AccelerateError, disabled_names, env_flag, installed, parse_bool
from accelerate_core.plugins import catalog

_MESH, _SAGEMAKER = "parallelism_config_", "aws_"


@functools.cache
def _of_plugins() -> dict[str, str]:
    """Return Accelerate's options that belong to plugins, with "flag" or "value" for each."""
    text = resources.files(__package__).joinpath("plugin_options.json").read_text(encoding="utf-8")
    made: dict[str, str] = json.loads(text)
    return made


@dataclass(frozen=True)
class _Given:
    """An option as it was given, with its words."""

    name: str
    words: tuple[str, ...]


def without_unused(words: Sequence[str]) -> list[str]:
    """Return the words after `launch` without options that have no effect, and print a warning for each.

    Other mistakes are left for `launch` to report.
    """
    # Most launches have no such options, so return without importing or planning anything.
    if _of_plugins().keys().isdisjoint(_name(word) for word in words if word.startswith("--")):
        return [*words]
    options, rest = _split(words)
    kept = [one for one in options if _counts(one, options)]
    while (unused := _first_unused(kept, rest)) is not None:
        names_of, why = unused
        for one in [one for one in kept if one.name in names_of]:
            _warn(one.name, f"it belongs {why}")
        kept = [one for one in kept if one.name not in names_of]
    return [*(word for one in kept for word in one.words), *rest]


def _name(word: str) -> str:
    return word.lstrip("-").partition("=")[0].replace("-", "_")


def _warn(name: str, why: str) -> None:
    click.echo(f"--{name} has no effect: {why}.", err=True)


def _command() -> tuple[Any, click.Context]:
    from accelerate_launch.cli import cli

    context = click.Context(cli, info_name="accelerate")
    command: Any = cli.get_command(context, "launch")
    command.contributed()
    return command, context


def _split(words: Sequence[str]) -> tuple[list[_Given], list[str]]:
    """Return the options before the script, and the rest."""
    command, context = _command()
    known = {_name(name): one for one in command.get_params(context) for name in one.opts}
    options, rest = [], [*words]
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word, following = rest[0], rest[1:2]
        count = 1
        if "=" not in word and _takes_next(_name(word), known.get(_name(word)), following):
            count = 2
        options.append(_Given(_name(word), tuple(rest[:count])))
        rest = rest[count:]
    return options, rest


def _takes_next(name: str, option: Any, following: list[str]) -> bool:
    """Return whether the word after an option is its value."""
    if option is not None:
        switch = getattr(option, "takes_switch", False)
        alone = switch and (not following or parse_bool(following[0]) is None)
        return not (option.is_flag or alone)
    return _of_plugins().get(name) == "value"


def _counts(option: _Given, options: list[_Given]) -> bool:
    """Return whether the launch may use an option, as far as this is known without a plan."""
    from accelerate_launch import accelerate_options

    name = option.name
    if name not in _of_plugins():
        return True
    if name.startswith(_SAGEMAKER):
        _warn(name, "it is for SageMaker jobs")
        return False
    if name.startswith(_MESH):
        if _asks_for_mesh(options):
            return True
        _warn(name, "it needs --use_parallelism_config")
        return False
    owner = accelerate_options.owner_of_option(name)
    here = {record.name for record in installed().plugins} - disabled_names()
    if owner is None or owner in here or (owner == "xla" and "tpu" in here):
        return True
    switches = [switch for switch, its in catalog.SWITCHES.items() if its == owner]
    asked = any(one.name in switches or owner in one.words for one in options)
    if not asked:
        _warn(name, f"it belongs to {owner!r}, which this launch does not use")
    return asked


def _asks_for_mesh(options: list[_Given]) -> bool:
    from accelerate_launch.planning import find_config

    if any(one.name == "use_parallelism_config" for one in options):
        return True
    if env_flag(os.environ, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        return True
    named = next((one.words[-1] for one in options if one.name == "config_file"), None)
    if named is None and not os.environ.get(CONFIG_VARIABLE):
        return False
    try:
        config = find_config(named and named.removeprefix("--config_file="), os.environ)
    except AccelerateError:
        return True  # launch reports what is wrong with the file
    return config is not None and "parallelism_config" in config


def _first_unused(options: list[_Given], rest: list[str]) -> tuple[tuple[str, ...], str] | None:
    """Return the names of an option whose plugin the launch does not use, and why; None if all are used."""
    from accelerate_launch.contributed import UnusedOptionError
    from accelerate_launch.planning import draft_plan, find_config

    command, context = _command()
    words = [word for one in options for word in one.words]
    try:
        made = command.make_context("launch", [*words, *rest], parent=context)
        given = dict(made.params)
        config = find_config(given.pop("config_file"), os.environ)
        draft_plan(given, dict(os.environ), config)
    except UnusedOptionError as error:
        return error.names, str(error).partition(" belongs ")[2].partition(". Add")[0]
    except (click.ClickException, click.exceptions.Exit, AccelerateError):
        return None
    return None
