"""`accelerate-core env`: what to paste into a bug report."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import click

from accelerate_core.builtin.console import console
from accelerate_core.errors import AccelerateError

_SECRET = re.compile(
    r"KEY|TOKEN|SECRET|PASS(WORD|WD|PHRASE)?|PWD|CREDENTIAL|AUTH|DSN|(^|_)PAT$", re.IGNORECASE
)
#: Whose values are shown; of others that look like ours only the name.
_KNOWN = re.compile(
    r"OMP_|MASTER_|TORCH(ELASTIC|INDUCTOR|DYNAMO|_DISTRIBUTED)|GLOO_|NCCL_|.*VISIBLE_DEVICES$"
    r"|(LOCAL_)?RANK$|(LOCAL_)?WORLD_SIZE$"
)
_OURS = re.compile(r"ACCELERATE_|TORCH")
#: Numbers, words, paths and lists of them: nothing with a login, a query or an object in it.
_PLAIN = re.compile(r"[\w.,:+\-/ ]*")
_DISTRIBUTIONS = ("torch", "numpy", "safetensors", "pydantic", "pluggy")


@click.command("env")
@click.option("--config_file", "--config-file", metavar="FILE", help="Read this config file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(config_file: str | None, as_json: bool) -> None:
    """Show versions, devices, plugins and the configuration in force."""
    from accelerate_core.config.files import CONFIG_VARIABLE
    from accelerate_launch.planning import find_config

    environ = dict(os.environ)
    config = find_config(config_file, environ)
    if config is not None:
        environ[CONFIG_VARIABLE] = str(config.path)
    made = environment_report(environ)
    if as_json:
        click.echo(json.dumps(made, indent=2))
    else:
        _print(made)


def environment_report(environ: Mapping[str, str]) -> dict[str, Any]:
    """Collect everything `env` shows; values that may be secret are left out."""
    return {
        "versions": _versions(),
        "devices": _devices(),
        "plugins": _plugins(environ),
        "configuration": _configuration(environ),
        "variables": _variables(environ),
    }


def _versions() -> dict[str, str]:
    from accelerate_core import __version__

    made = {
        "accelerate-core": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for name in _DISTRIBUTIONS:
        try:
            made[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            made[name] = "not installed"
    return made


def _devices() -> dict[str, Any]:
    import psutil
    import torch

    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    count = torch.accelerator.device_count() if accelerator is not None else 0
    made: dict[str, Any] = {
        "accelerator": accelerator.type if accelerator is not None else "none",
        "accelerators": count,
        "cpu cores": os.cpu_count() or 1,
        "cpu threads of torch": torch.get_num_threads(),
        "memory (GiB)": round(psutil.virtual_memory().total / 2**30, 1),
        "memory free (GiB)": round(psutil.virtual_memory().available / 2**30, 1),
    }
    module = torch.get_device_module(accelerator) if accelerator is not None else None
    for index in range(count):
        properties = getattr(module, "get_device_properties", lambda _: None)(index)
        if properties is not None:
            memory = getattr(properties, "total_memory", 0) / 2**30
            made[f"device {index}"] = f"{getattr(properties, 'name', 'unnamed')}, {memory:.1f} GiB"
    return made


def _plugins(environ: Mapping[str, str]) -> list[dict[str, Any]]:
    from accelerate_core.config.files import CONFIG_VARIABLE, read_config
    from accelerate_launch.explain.planned_run import planned_run
    from accelerate_launch.explain.report import rows

    named = environ.get(CONFIG_VARIABLE)
    run = planned_run(environ, read_config(named) if named else None)
    return [row.as_dict() for row in rows(run)]


def _configuration(environ: Mapping[str, str]) -> dict[str, dict[str, str]]:
    from accelerate_core.config.files import CONFIG_VARIABLE, read_config
    from accelerate_core.config.lookup import Sources, resolve_core
    from accelerate_launch.planning import decide

    named = environ.get(CONFIG_VARIABLE)
    rows = {"config_file": {"value": named or "none", "from": "" if named else "default"}}
    try:
        config = read_config(named) if named else None
        values = resolve_core({}, Sources.of(environ), {})
        chosen = decide({}, environ, config).chosen  # as `config show` tells them
    except AccelerateError as error:
        return {**rows, "error": {"value": str(error), "from": ""}}
    told = {name: one for name, one in chosen.items() if one.value is not None}
    rows |= {
        name: {"value": str(because.value), "from": because.origin}
        for name, because in {**values, **told}.items()
    }
    return rows


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    from accelerate_core.config.core import CORE_SETTINGS
    from accelerate_launch.contributed import contributed_options

    known = {name for setting in CORE_SETTINGS for name in setting.env}
    known |= {option.env for option in contributed_options(environ)}
    made = {}
    for name, text in sorted(environ.items()):
        ours = name in known or bool(_KNOWN.match(name))
        if ours or _OURS.match(name):
            show = ours and not _SECRET.search(name) and _PLAIN.fullmatch(text)
            made[name] = text if show else "(hidden)"
    return made


def _print(made: Mapping[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from accelerate_launch.commands.plugins import print_rows

    for title in ("versions", "devices", "variables"):
        if made[title]:
            table = Table("name", "value", title=title, title_justify="left")
            for name, value in made[title].items():
                table.add_row(name, Text(str(value), overflow="fold"))
            console().print(table)
    table = Table("setting", "value", "from", title="configuration", title_justify="left")
    for name, row in made["configuration"].items():
        table.add_row(name, Text(row["value"]), Text(row["from"], overflow="fold"))
    console().print(table)
    print_rows(made["plugins"], title="plugins")
