"""`accelerate-core config`: write, change, show and check config files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
import yaml

from accelerate_core.config.files import CONFIG_VARIABLE, parse_config
from accelerate_core.plugin import (
    ConfigFile,
    ConfigurationError,
    disabled_names,
    find,
    installed,
    read_config,
)
from accelerate_core.plugins import catalog
from accelerate_launch import accelerate_options
from accelerate_launch.commands.click_options import CONTEXT, complete_file
from accelerate_launch.commands.dialogue import ask_everything
from accelerate_launch.commands.tables import print_table, shown
from accelerate_launch.contributed import plugin_variables
from accelerate_launch.paths import accelerate_config_path, default_config_path
from accelerate_launch.planning import decide, find_config
from accelerate_launch.rank_check import check_file, print_findings
from accelerate_launch.schemas import WITH_SETTINGS

C = TypeVar("C", bound=Callable[..., Any])


def _file_option(function: C) -> C:
    """Add `--config_file`, which is accepted before the name of a subcommand, too."""

    def remembered(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
        file: str | None = value or ctx.obj
        ctx.obj = file
        return file

    return click.option(
        "--config_file",
        metavar="FILE",
        shell_complete=complete_file,
        callback=remembered,
        help="The config file; default: config.yaml in the cache directory.",
    )(function)


@click.group("config", invoke_without_command=True, context_settings=CONTEXT)
@_file_option
@click.option("--yes", "-y", is_flag=True, help="Use the suggested values without asking.")
@click.option(
    "--to",
    "format",
    type=click.Choice(["skypilot"]),
    help="Convert the config file to a task file of SkyPilot, without asking.",
)
@click.option(
    "--accelerator", metavar="NAME", help="With --to: accelerators of each machine: H100:8."
)
@click.option(
    "--command", "run", metavar="TEXT", default="train.py", help="With --to: script and arguments."
)
@click.option("--output", metavar="FILE", help="With --to: the file to write; default: print it.")
@click.pass_context
def command(
    ctx: click.Context,
    config_file: str | None,
    yes: bool,
    format: str | None,
    accelerator: str | None,
    run: str,
    output: str | None,
) -> None:
    """Ask a few questions about this machine, and write a config file.

    Only questions that the installed plugins need are asked. Without a terminal, the answers are
    read from standard input, one per line. An empty line accepts the suggested answer.
    """
    if format is not None:
        _convert(config_file, accelerator, run, output)
    elif ctx.invoked_subcommand is None:
        _write(_path(config_file), ask_everything(os.environ, ask=not yes))


@command.command("default", context_settings=CONTEXT)
@_file_option
@click.option("--mixed_precision", metavar="NAME", help="The precision to write into the file.")
def default_command(config_file: str | None, mixed_precision: str | None) -> None:
    """Write a config file for this machine, without asking questions."""
    values = ask_everything(os.environ, ask=False)
    if mixed_precision is not None:
        find("precision", mixed_precision.lower(), source="command line --mixed_precision")
        values["mixed_precision"] = mixed_precision.lower()
    _write(_path(config_file), values)


@command.command("import", context_settings=CONTEXT)
@click.argument("file", required=False, shell_complete=complete_file)
@_file_option
def import_command(file: str | None, config_file: str | None) -> None:
    """Import a config FILE of Hugging Face Accelerate.

    The default is the file that `accelerate launch` reads. Its values are written to a config file of
    accelerate-core, which later launches use.
    """
    path = _path(config_file)
    if path.exists():
        raise ConfigurationError(
            f"{path} already exists. Remove it, or choose another file with --config_file."
        )
    source = Path(file) if file is not None else accelerate_config_path(os.environ)
    if file is None and not source.is_file():
        raise ConfigurationError(
            f"There is no config file of Hugging Face Accelerate at {source}. Name the file to "
            "import: accelerate-core config import FILE."
        )
    config = read_config(source)
    _check(config)  # here, so that errors name lines of the original file
    values = accelerate_options.effective_values(config)
    click.echo(f"Read {source}: {', '.join(map(str, values)) or 'no setting'}.")
    left_out = {**accelerate_options.OBSOLETE_KEYS, **accelerate_options.IGNORED_KEYS}
    for key in config:
        if key not in values:
            click.echo(f"Left out {key}: {left_out[key]}.")
    _write(path, values)


@command.command("set", context_settings=CONTEXT)
@click.argument("key")
@click.argument("value")
@_file_option
def set_command(key: str, value: str, config_file: str | None) -> None:
    """Set KEY, or SECTION.KEY, to VALUE. The rest of the file stays as it is, with its comments."""
    from accelerate_launch.editing import with_value

    path = _path(config_file)
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    if before:
        parse_config(before, path)  # raises for errors that were in the file before
    _store(path, with_value(before, key, value))
    click.echo(f"{key}: {value} in {path}")


@command.command("show", context_settings=CONTEXT)
@_file_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def show_command(config_file: str | None, as_json: bool) -> None:
    """Show every value that a launch would use, and its source."""
    environ = dict(os.environ)
    made = decide({}, environ, find_config(config_file, environ))
    rows = {**made.chosen, **plugin_variables(environ), **made.contributed}
    if as_json:
        said = {name: {"value": one.value, "from": one.origin} for name, one in rows.items()}
        click.echo(json.dumps(said, indent=2, default=str))
        return
    cells = (
        [(text, "dim" * (one.origin == "default")) for text in (name, shown(one.value), one.origin)]
        for name, one in rows.items()
        if one.value is not None
    )
    columns = ("setting", "value", "from")
    print_table(columns, cells, title="what a launch would use", names_whole=True)


@command.command("validate", context_settings=CONTEXT)
@click.argument("file", required=False, shell_complete=complete_file)
@_file_option
def validate_command(file: str | None, config_file: str | None) -> None:
    """Check FILE as a launch and a run would. Exits with status 2 if either would refuse it.

    What they would ignore is a warning. Arguments in the script may still contradict the file.
    """
    path = Path(file or _path(config_file))
    config = read_config(path)
    _check(config)
    _check_deeply(config)
    print_findings(partial(check_file, config, _environ_of_files()))
    names = {record.name for record in installed().plugins}
    for key, extra in catalog.SECTIONS.items():
        if key in config and extra not in names:
            way = catalog.pip_command(extra)
            click.echo(f"note: {key} belongs to a plugin that is not installed: {way}", err=True)
    click.echo(f"{path}: valid")


@command.command("schema", context_settings=CONTEXT)
def schema_command() -> None:
    """Print a JSON schema of config files, for editors.

    It has the keys and values of all plugins that are installed here.
    """
    from accelerate_launch.json_schema import config_schema

    click.echo(json.dumps(config_schema(), indent=2))


@command.command("update", context_settings=CONTEXT)
@_file_option
def update_command(config_file: str | None) -> None:
    """Rewrite an older file with current keys, and keep a backup."""
    path = _path(config_file)
    config = read_config(path)
    _check(config)
    values = accelerate_options.effective_values(config)
    gone = [key for key in config if key not in values]
    kept = path.with_name(path.name + ".bak")
    number = 1
    while kept.exists():  # never overwrite a backup: the oldest one is what a person wrote
        number += 1
        kept = path.with_name(f"{path.name}.bak{number}")
    kept.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    _write(path, values)
    left = f" Left out: {', '.join(gone)}." if gone else ""
    click.echo(f"Saved the old file as {kept}.{left}")


def _convert(
    config_file: str | None, accelerator: str | None, run: str, output: str | None
) -> None:
    from accelerate_launch.skypilot import task_file

    config = read_config(_path(config_file))
    name = output or "task.yaml"
    environ = _environ_of_files()
    text = task_file(config, environ, accelerator=accelerator, command=run, name=name)
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"Cannot write {output}: {error.strerror}.") from None
    click.echo(f"Written: {output}")


def _path(named: str | None) -> Path:
    return Path(named or os.environ.get(CONFIG_VARIABLE) or default_config_path(os.environ))


def _write(path: Path, values: Mapping[str, Any]) -> None:
    _store(path, yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True))
    click.echo(f"Written: {path}")


def _store(path: Path, text: str) -> None:
    """Write a config file after checking that a launch would accept it."""
    _check(parse_config(text, path))
    beside = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise ConfigurationError(f"Cannot write {path}: {error.strerror}.") from None


def _check(config: ConfigFile) -> None:
    """Check a file alone, without the environment's settings or a surrounding scheduler."""
    decide({}, _environ_of_files(), config)


def _environ_of_files() -> dict[str, str]:
    """Return the environment without settings and without the variables of a scheduler."""
    kept = ("PATH", "HOME", "XDG_CACHE_HOME", "PYTHONPATH", "ACCELERATE_DISABLED_PLUGINS")
    return {name: text for name, text in os.environ.items() if name in kept}


def _check_deeply(config: ConfigFile) -> None:
    """Check every section by creating its settings, as the plugin would in a run."""
    import torch

    from accelerate_core.builtin.no_checkpointer import NoCheckpointer
    from accelerate_core.plugin import (
        ParallelismConfig,
        PluginFactory,
        ProjectConfiguration,
        Request,
        Sources,
        Topology,
        TorchDynamoPlugin,
        resolve_core,
        resolve_settings,
        select,
    )

    sources = Sources({}, config)
    values = resolve_core({}, sources, {})
    if (signals := values["preemption_signals"].value) is not None:
        chosen = select("checkpointer", Request({}, os.environ, Topology()), values["checkpointer"])
        # The checkpointer refuses signals that cannot be caught.
        if found := chosen.or_raise().active:
            factory = PluginFactory(sources)
            factory.create_part(found[0].record, ProjectConfiguration(), signals)
        else:
            NoCheckpointer(ProjectConfiguration(), signals)
    device = values["torch_device"].value
    try:
        torch.device(device or "cpu")
    except RuntimeError as error:
        raise ConfigurationError(
            f"torch_device={device!r} (from {values['torch_device'].origin}): "
            f"{str(error).splitlines()[0]}"
        ) from None
    resolve_settings(ParallelismConfig, None, sources)
    resolve_settings(TorchDynamoPlugin, None, sources)
    for record in installed().plugins:
        mine = {f"{record.name}_config", *record.triggers} & set(config)
        if record.kind in WITH_SETTINGS and mine and record.name not in disabled_names():
            plugin = record.load()
            own = (
                getattr(plugin, "Settings", None),
                *(getattr(plugin, "more_settings", None) or ()),
            )
            for cls in filter(None, own):
                resolve_settings(cls, None, sources, owner=record.name)
