"""`accelerate to-fsdp2`: rewrite a config file for FSDP1 as one for FSDP2."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

import yaml

from accelerate_core.plugin import MissingPluginError, pip_command
from accelerate_drop_in.commands.arguments import CustomArgumentParser, run_own

_WHAT = "Rewrite a config file for FSDP1 as one for FSDP2."
#: A key that accelerate-core's FSDP2 supports, but that Accelerate's converter removes.
_LEFT_OUT = "fsdp_forward_prefetch"

logger = logging.getLogger("accelerate.commands.to_fsdp2")


def main() -> None:
    """Run `accelerate to-fsdp2`."""
    run_own(to_fsdp2_command_parser(), to_fsdp2_command, sys.argv[1:])


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the argument parser of `accelerate to-fsdp2`."""
    if subparsers is not None:
        parser = subparsers.add_parser("to-fsdp2", description=_WHAT)
        parser.set_defaults(func=to_fsdp2_command)
    else:
        parser = CustomArgumentParser("accelerate to-fsdp2", description=_WHAT)
    parser.add_argument("--config_file", required=True, help="the file to convert")
    parser.add_argument("--output_file", help="the file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    made: argparse.ArgumentParser = parser
    return made


def load_config(config_file: str) -> dict[str, Any]:
    """Return the values of a config file.

    Raises:
        ValueError: the file is empty.
    """
    found: dict[str, Any] = yaml.safe_load(Path(config_file).read_text(encoding="utf-8"))
    if not found:
        raise ValueError(f"The config file {config_file} is empty.")
    return found


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Convert the config file in `args`.

    Raises:
        FileNotFoundError: the config file does not exist.
        FileExistsError: the output file already exists.
        ValueError: neither --output_file nor --overwrite is given.
    """
    source = Path(args.config_file)
    target = args.output_file
    if not source.exists():
        raise FileNotFoundError(f"There is no config file {source}.")
    if target is None and not args.overwrite:
        raise ValueError("Name the new file with --output_file, or pass --overwrite.")
    if target is not None and Path(target).exists() and not args.overwrite:
        raise FileExistsError(f"{target} already exists. Pass --overwrite to replace it.")
    made = convert_config_to_fsdp2(load_config(args.config_file))
    Path(target or source).write_text(yaml.safe_dump(made, sort_keys=False), encoding="utf-8")


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """Convert the values of a config file for FSDP1 to FSDP2. Other values are returned unchanged.

    Raises:
        ConfigurationError: FSDP2 does not support a setting.
        MissingPluginError: the backend is not installed.
    """
    section = config.get("fsdp_config")
    if not section:
        logger.info("The config has no fsdp_config, so nothing is converted.")
        return config
    if section.get("fsdp_version") == 2:
        logger.warning(
            "The config is already for FSDP2 (fsdp_version: 2), so nothing is converted. If its other "
            "keys are for FSDP1, set fsdp_version to 1 and convert it again."
        )
        return config
    try:
        from accelerate_fsdp2.convert import converted
    except ModuleNotFoundError as error:
        raise MissingPluginError(
            f"FSDP2 needs a backend that is not installed. Install it with: {pip_command('fsdp2')}"
        ) from error
    if _LEFT_OUT in section:
        logger.warning(
            "%s is removed, as by Accelerate's converter, although FSDP2 supports it here.",
            _LEFT_OUT,
        )
        section = {key: value for key, value in section.items() if key != _LEFT_OUT}
    made, notes = converted({**config, "fsdp_config": section}, "The config")
    for note in notes:
        logger.warning(note)
    new = made["fsdp_config"]
    for key in section:
        if f"fsdp_{key}" in new and key not in new:  # keep keys without the prefix as they were
            new[key] = new.pop(f"fsdp_{key}")
    return made
