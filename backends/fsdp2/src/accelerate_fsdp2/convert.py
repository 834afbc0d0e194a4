"""The command `accelerate-core to-fsdp2`, which converts config files from FSDP1 to FSDP2."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import yaml

from accelerate_core.plugin import ConfigurationError, pip_command, read_config
from accelerate_fsdp2.settings import strategy_name

#: Keys of FSDP1 that are not options of FSDP2, and why.
_REMOVED = {
    "fsdp_backward_prefetch": "FSDP2 always prefetches in backward",
    "fsdp_use_orig_params": "FSDP2 always keeps the original parameters",
    "fsdp_sync_module_states": "rank 0's weights are sent to all ranks by default",
}


@click.command("to-fsdp2")
@click.option(
    "--config_file",
    "--config-file",
    metavar="FILE",
    help="The file to convert (default: the file that launch uses).",
)
@click.option(
    "--output_file", "--output-file", metavar="FILE", help="Where to write the converted file."
)
@click.option("--overwrite", is_flag=True, help="Replace the output file if it exists.")
def command(config_file: str | None, output_file: str | None, overwrite: bool) -> None:
    """Convert a config file from FSDP1 to FSDP2."""
    source = Path(config_file) if config_file else _default_file()
    target = Path(output_file) if output_file else source
    if target.exists() and not overwrite:
        raise click.UsageError(
            f"{target} already exists. Pass another --output_file, or --overwrite."
        )
    config = read_config(source)
    values, notes = converted({key: config[key] for key in config}, str(source))
    target.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    for note in notes:
        click.echo(note, err=True)
    click.echo(f"Written: {target}")


def _default_file() -> Path:
    try:
        from accelerate_launch import default_config_path
    except ModuleNotFoundError:
        raise click.UsageError(
            "There is no default config file, because accelerate-launch is not installed. Name a "
            f"file with --config_file, or run: {pip_command('launch')}"
        ) from None
    return default_config_path(os.environ)


def converted(values: dict[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a config file converted to FSDP2, and notes about the changes.

    Raises:
        ConfigurationError: the file is not for FSDP1, or FSDP2 does not support its strategy.
    """
    section = values.get("fsdp_config")
    if not isinstance(section, dict):
        raise ConfigurationError(f"{where} is not a config file for FSDP: it has no fsdp_config.")
    names = {(k if str(k).startswith("fsdp_") else f"fsdp_{k}"): v for k, v in section.items()}
    if "fsdp_backward_prefetch_policy" in names:
        names["fsdp_backward_prefetch"] = names.pop("fsdp_backward_prefetch_policy")
    if names.get("fsdp_version") == 2:
        raise ConfigurationError(f"{where} is already for FSDP2 (fsdp_version: 2).")
    notes = []
    made: dict[str, Any] = {"fsdp_version": 2}
    mesh: dict[str, Any] = {}
    for name, value in names.items():
        if name in _REMOVED:
            notes.append(f"{name}: {value} was removed, because {_REMOVED[name]}.")
        elif name == "fsdp_sharding_strategy":
            reshard, mesh = _strategy(value, where, values)
            made["fsdp_reshard_after_forward"] = reshard
            notes.append(
                f"{name}: {value} was replaced by fsdp_reshard_after_forward: "
                f"{made['fsdp_reshard_after_forward']}."
            )
        elif name == "fsdp_state_dict_type" and value == "LOCAL_STATE_DICT":
            made[name] = "SHARDED_STATE_DICT"
            notes.append(f"{name}: {value} was replaced by SHARDED_STATE_DICT.")
        elif name != "fsdp_version":
            made[name] = value
    new = {**values, "fsdp_config": made}
    if mesh:
        new["parallelism_config"] = {**mesh, **(values.get("parallelism_config") or {})}
    return new, notes


def _strategy(value: Any, where: str, values: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Return the value of `reshard_after_forward`, and the sizes of a mesh."""
    text = strategy_name(value)
    if text in ("FULL_SHARD", "SHARD_GRAD_OP"):
        return text == "FULL_SHARD", {}
    if text in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2"):
        machines = int(values.get("num_machines", 1))
        each = int(values.get("num_processes", machines)) // machines
        prefix = "parallelism_config"
        sizes = {f"{prefix}_dp_replicate_size": machines, f"{prefix}_dp_shard_size": each}
        return text == "HYBRID_SHARD", sizes
    if text == "NO_SHARD":
        raise ConfigurationError(
            f"{where}: fsdp_sharding_strategy: {value} has no equivalent in FSDP2, which always "
            "shards. To use the backend ddp, remove fsdp_config from the file."
        )
    raise ConfigurationError(f"{where}: fsdp_sharding_strategy: {value} is not a valid value.")
