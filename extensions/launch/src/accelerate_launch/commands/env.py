"""`accelerate-core env`: what to paste into a bug report."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import psutil

from accelerate_core.config.core import CORE_SETTINGS
from accelerate_core.plugin import AccelerateError, ConfigFile, Sources, installed, resolve_core
from accelerate_launch.commands.click_options import complete_file
from accelerate_launch.commands.tables import print_table, shown
from accelerate_launch.contributed import contributed_options
from accelerate_launch.devices import torch_build
from accelerate_launch.explain.planned_run import planned_run
from accelerate_launch.explain.report import rows as plugin_rows
from accelerate_launch.planning import decide, find_config

_SECRET = re.compile(
    r"KEY|TOKEN|SECRET|PASS(WORD|WD|PHRASE)?|PWD|CREDENTIAL|AUTH|DSN|(^|_)PAT$", re.IGNORECASE
)
#: Variables that are shown with their values. For others that match `_OURS`, only the name is shown.
_KNOWN = re.compile(
    r"OMP_|MASTER_|PET_|JOB_COMPLETION_INDEX$|TORCH(ELASTIC|INDUCTOR|DYNAMO|_DISTRIBUTED)|GLOO_|NCCL_|.*VISIBLE_DEVICES$"
    r"|(LOCAL_)?RANK$|(LOCAL_)?WORLD_SIZE$"
)
_OURS = re.compile(r"ACCELERATE_|TORCH")
#: Values that are numbers, words, paths or lists of them, and so can't contain a login or a query.
_PLAIN = re.compile(r"[\w.,:+\-/ ]*")
_DISTRIBUTIONS = ("accelerate-core", "torch", "numpy", "safetensors", "pydantic", "pluggy")


@click.command("env")
@click.option(
    "--config_file",
    "--config-file",
    metavar="FILE",
    help="Read this config file.",
    shell_complete=complete_file,
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(config_file: str | None, as_json: bool) -> None:
    """Show versions, devices, the effective configuration and the active plugins."""
    environ = dict(os.environ)
    made = environment_report(environ, find_config(config_file, environ))
    if as_json:
        click.echo(json.dumps(made, indent=2))
    else:
        _print(made)


def environment_report(
    environ: Mapping[str, str], config: ConfigFile | None = None
) -> dict[str, Any]:
    """Collect everything that `env` shows. Values that may be secret are left out."""
    return {
        "versions": _versions(),
        "devices": _devices(),
        "plugins": plugin_rows(planned_run(environ, config)),
        "configuration": _configuration(environ, config),
        "variables": _variables(environ),
    }


def _versions() -> dict[str, str]:
    made = {"python": platform.python_version(), "platform": platform.platform()}
    for name in dict.fromkeys((*_DISTRIBUTIONS, *sorted(_plugin_distributions()))):
        try:
            made[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            made[name] = "not installed"
    return made


def _plugin_distributions() -> set[str]:
    """Return the distributions with entry points for the core, and all that are named like ours."""
    found = set()
    for dist in metadata.distributions():
        name = (dist.name or "").lower().replace("_", "-")
        declares = any(point.group.startswith("accelerate_core.") for point in dist.entry_points)
        if declares or name == "accelerate" or name.startswith("accelerate-"):
            found.add(name)
    return found


def _devices() -> dict[str, Any]:
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator is not None else 0
    made: dict[str, Any] = {
        "accelerator": accelerator.type if accelerator is not None else "none",
        "accelerators": count,
        "cpu cores": os.cpu_count() or 1,
        "cpu threads of torch": torch.get_num_threads(),
        "memory (GiB)": round(psutil.virtual_memory().total / 2**30, 1),
        "memory free (GiB)": round(psutil.virtual_memory().available / 2**30, 1),
    }
    made["torch built for"] = (
        ", ".join(f"{name} {version}" for name, version in torch_build().items()) or "the CPU"
    )
    for point in metadata.entry_points(group="torch.backends"):
        made[f"torch extension {point.name}"] = _owner(point.dist)
    for record in installed().of_kind("device"):
        if accelerator is not None and record.name == accelerator.type:
            made["device plugin"] = record.label
    made["collectives"] = _collectives() or "none"
    module = torch.get_device_module(accelerator) if accelerator is not None else None
    for index in range(count):
        properties = getattr(module, "get_device_properties", lambda _: None)(index)
        if properties is not None:
            memory = getattr(properties, "total_memory", 0) / 2**30
            made[f"device {index}"] = f"{getattr(properties, 'name', 'unnamed')}, {memory:.1f} GiB"
            if driver := driver_version(properties):
                made["driver"] = driver
    return made


def driver_version(properties: Any, files: Path = Path("/")) -> str:
    """Return the version of a device's driver, "" if it is unknown.

    Args:
        properties: the properties of the device, which contain the version for xpu.
        files: the root of the files in which Linux shows the versions of NVIDIA's and AMD's drivers.
    """
    if driver := getattr(properties, "driver_version", ""):
        return str(driver)
    for name in ("proc/driver/nvidia/version", "sys/module/amdgpu/version"):
        try:
            text = (files / name).read_text(encoding="utf-8")
        except OSError:
            continue
        if found := re.search(r"(?<!\S)\d+\.[\d.]+", text):
            return found.group()
    return ""


def _owner(dist: metadata.Distribution | None) -> str:
    return "unknown" if dist is None else f"{dist.name} {dist.version}"


def _collectives() -> str:
    """Return torch.distributed's backend for each type of device, with the module that registered it."""
    import torch.distributed as dist

    if not dist.is_available():
        return ""
    told = []
    for kind, backend in dist.Backend.default_device_backend_map.items():
        plugin = dist.Backend._plugins.get(backend.upper())
        by = "torch" if plugin is None else plugin.creator_fn.__module__
        told.append(f"{kind}: {backend} ({by})")
    return ", ".join(told)


def _configuration(
    environ: Mapping[str, str], config: ConfigFile | None
) -> dict[str, dict[str, str]]:
    named = {"value": "none", "from": "default"}
    told = {"config_file": named if config is None else {"value": str(config.path), "from": ""}}
    try:
        values = resolve_core({}, Sources(environ, config), {})
        chosen = decide({}, environ, config).chosen  # the same values as in `config show`
    except AccelerateError as error:
        return {**told, "error": {"value": str(error), "from": ""}}
    values |= {name: one for name, one in chosen.items() if one.value is not None}
    for name, sourced in values.items():
        told[name] = {"value": shown(sourced.value), "from": sourced.origin}
    return told


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
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
    for title in ("versions", "devices", "variables"):
        if made[title]:
            rows = made[title].items()
            print_table(("name", "value"), rows, title=title, names_whole=True)
    settings = ((name, *row.values()) for name, row in made["configuration"].items())
    columns = ("setting", "value", "from")
    print_table(columns, settings, title="configuration", names_whole=True)
    active = [row for row in made["plugins"] if row["state"] == "active"]
    faulty = [row for row in made["plugins"] if row["state"] in ("broken", "refused", "undecided")]
    plugins = [(row["kind"], row["name"], row["reason"]) for row in active]
    plugins += [(row["kind"], f"{row['name']}: {row['state']}", row["reason"]) for row in faulty]
    print_table(("kind", "active plugin", "reason"), plugins, title="plugins")
    click.echo("Run accelerate-core plugins --all to list every plugin and whether it is active.")
