"""`accelerate-core config`: write, change, show and check config files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from accelerate_core.builtin.console import console
from accelerate_core.errors import ConfigurationError
from accelerate_launch.commands.options import underscores

C = TypeVar("C", bound=Callable[..., Any])
_SETTINGS = {"token_normalize_func": underscores}


def _file_option(function: C) -> C:
    return click.option(
        "--config_file",
        metavar="FILE",
        help="The file; default: config.yaml in the cache directory.",
    )(function)


@click.group("config", invoke_without_command=True, context_settings=_SETTINGS)
@_file_option
@click.option("--yes", "-y", is_flag=True, help="Ask nothing: take what fits this machine.")
@click.pass_context
def command(ctx: click.Context, config_file: str | None, yes: bool) -> None:
    """Set up this machine by a few questions, and write what was answered into a file.

    Only what the installed plugins need is asked. Without a terminal the answers are read from
    the input, one per line; an empty line takes what is offered.
    """
    ctx.obj = config_file
    if ctx.invoked_subcommand is not None:
        return
    from accelerate_launch.commands.dialogue import ask_everything

    environ = dict(os.environ)
    _write(_path(config_file, environ), ask_everything(environ, ask=not yes), environ)


@command.command("default", context_settings=_SETTINGS)
@_file_option
@click.option("--mixed_precision", metavar="NAME", help="Precision of the runs.")
@click.pass_context
def default_command(
    ctx: click.Context, config_file: str | None, mixed_precision: str | None
) -> None:
    """Write what fits this machine, without questions."""
    from accelerate_launch.commands.dialogue import ask_everything

    environ = dict(os.environ)
    values = ask_everything(environ, ask=False)
    if mixed_precision is not None:
        from accelerate_core.plugins.discovery import find

        find("precision", mixed_precision.lower(), because="command line --mixed_precision")
        values["mixed_precision"] = mixed_precision.lower()
    _write(_path(config_file or ctx.obj, environ), values, environ)


@command.command("set", context_settings=_SETTINGS)
@click.argument("key")
@click.argument("value")
@_file_option
@click.pass_context
def set_command(ctx: click.Context, key: str, value: str, config_file: str | None) -> None:
    """Set KEY, or SECTION.KEY, to VALUE; the rest of the file stays as it is, comments too."""
    from accelerate_core.config.files import parse_config
    from accelerate_launch.editing import with_value

    environ = dict(os.environ)
    path = _path(config_file or ctx.obj, environ)
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    if before:
        parse_config(before, path)  # what is wrong already is said as such
    text = with_value(before, key, value)
    _check(parse_config(text, path), environ)
    _store(path, text)
    click.echo(f"{key}: {value} in {path}")


@command.command("show", context_settings=_SETTINGS)
@_file_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_context
def show_command(ctx: click.Context, config_file: str | None, as_json: bool) -> None:
    """Show every value a launch would take now, and where it comes from."""
    from accelerate_launch.contributed import said_by_environment
    from accelerate_launch.planning import decide, find_config

    environ = dict(os.environ)
    made = decide({}, environ, find_config(config_file or ctx.obj, environ))
    rows = {**said_by_environment(environ), **made.contributed}
    rows = {**made.chosen, **rows}
    if as_json:
        said = {name: {"value": one.value, "from": one.origin} for name, one in rows.items()}
        click.echo(json.dumps(said, indent=2, default=str))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table("setting", "value", "from", title="what a launch would take")
    for name, one in rows.items():
        if one.value is not None:
            style = "dim" if one.origin == "default" else ""
            table.add_row(name, Text(str(one.value), overflow="fold"), one.origin, style=style)
    console().print(table)


@command.command("validate", context_settings=_SETTINGS)
@click.argument("file", required=False)
@_file_option
@click.pass_context
def validate_command(ctx: click.Context, file: str | None, config_file: str | None) -> None:
    """Check FILE as a run would, with the settings of its plugins; status 2 if anything is wrong."""
    from accelerate_core.config.files import read_config

    environ = dict(os.environ)
    path = Path(file or _path(config_file or ctx.obj, environ))
    config = read_config(path)
    for note in _check(config, environ, deep=True):
        click.echo(f"note: {note}", err=True)
    click.echo(f"{path}: fine")


@command.command("update", context_settings=_SETTINGS)
@_file_option
@click.pass_context
def update_command(ctx: click.Context, config_file: str | None) -> None:
    """Rewrite a file of an older version in today's keys; the old one is kept beside it."""
    from accelerate_core.config.files import read_config

    environ = dict(os.environ)
    path = _path(config_file or ctx.obj, environ)
    config = read_config(path)
    _check(config, environ)
    from accelerate_launch import peer

    gone = [key for key in config if key in (*peer.OBSOLETE_KEYS, *peer.IGNORED_KEYS)]
    values = {key: config[key] for key in config if key not in gone}
    kept = path.with_name(path.name + ".bak")
    number = 1
    while kept.exists():  # the oldest one has what a person wrote
        number += 1
        kept = path.with_name(f"{path.name}.bak{number}")
    kept.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    _write(path, values, environ)
    left = f" Left out: {', '.join(gone)}." if gone else ""
    click.echo(f"The old file is {kept}.{left}")


def _path(named: str | None, environ: Mapping[str, str]) -> Path:
    from accelerate_core.config.files import CONFIG_VARIABLE
    from accelerate_launch.paths import default_config_path

    return Path(named or environ.get(CONFIG_VARIABLE) or default_config_path(environ))


def _write(path: Path, values: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    import yaml

    from accelerate_core.config.files import parse_config

    text = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
    _check(parse_config(text, path), environ)
    _store(path, text)
    click.echo(f"Written: {path}")


def _store(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise ConfigurationError(f"Cannot write {path}: {error.strerror}.") from None


def _check(config: Any, environ: Mapping[str, str], *, deep: bool = False) -> list[str]:
    """Check a file by itself: neither variables nor what is around have a say; return notes."""
    from accelerate_core.plugins import catalog
    from accelerate_core.plugins.discovery import installed
    from accelerate_launch.planning import decide

    quiet = {
        name: text
        for name, text in environ.items()
        if name in ("PATH", "HOME", "XDG_CACHE_HOME", "PYTHONPATH", "ACCELERATE_DISABLED_PLUGINS")
    }
    decide({}, quiet, config)
    if not deep:
        return []
    _check_deeply(config)
    names = {record.name for record in installed().plugins}
    return [
        f"{key} belongs to a plugin that is not installed: {catalog.pip_command(extra)}"
        for key, extra in catalog.SECTIONS.items()
        if key in config and extra not in names
    ]


def _check_deeply(config: Any) -> None:
    """Build the settings of every section, as the plugin itself would."""
    import torch

    from accelerate_core.builtin.no_checkpointer import NoCheckpointer
    from accelerate_core.config.handlers import ProjectConfiguration, TorchDynamoPlugin
    from accelerate_core.config.lookup import Sources, resolve_core, resolve_settings
    from accelerate_core.config.parallelism import ParallelismConfig
    from accelerate_core.contract.topology import Topology
    from accelerate_core.plugins.discovery import disabled_names, installed
    from accelerate_core.plugins.manager import Part
    from accelerate_core.plugins.selection import Request, select
    from accelerate_launch.schemas import WITH_SETTINGS

    sources = Sources({}, config)
    values = resolve_core({}, sources, {})
    if (signals := values["preemption_signals"].value) is not None:
        chosen = select("checkpointer", Request({}, os.environ, Topology()), values["checkpointer"])
        saves = Part.of(chosen, sources, {})
        make = NoCheckpointer if saves is None else saves.make
        make(ProjectConfiguration(), signals)  # refuses signals that cannot be caught
    device = values["torch_device"].value
    try:
        torch.device(device or "cpu")
    except RuntimeError as error:
        raise ConfigurationError(
            f"torch_device={device!r} (from {values['torch_device'].origin}): "
            f"{str(error).splitlines()[0]}"
        ) from None
    found: list[tuple[type[Any], str]] = [(ParallelismConfig, ""), (TorchDynamoPlugin, "")]
    for record in installed().plugins:
        mine = {f"{record.name}_config", *record.triggers} & set(config)
        if record.kind in WITH_SETTINGS and mine and record.name not in disabled_names():
            cls = getattr(record.load(), "Settings", None)
            if cls is not None:
                found.append((cls, record.name))
    for cls, owner in found:
        resolve_settings(cls, None, sources, owner=owner)
