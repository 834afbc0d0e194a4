"""`accelerate env`: print the lines that issue templates ask for."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from shutil import which
from typing import Any

import numpy
import psutil
import torch

from accelerate_core import __version__ as core_version
from accelerate_core.config.files import CONFIG_VARIABLE
from accelerate_drop_in import NAME, VERSION
from accelerate_drop_in.commands.arguments import CustomArgumentParser, run_own
from accelerate_drop_in.commands.config_files import default_config, load_config_from_file

#: Accelerate's names for devices, if they differ from the upper-case device type.
_KINDS = {"cpu": "N/A", "cuda": "CUDA"}


def main() -> None:
    """Run `accelerate env`."""
    run_own(env_command_parser(), env_command, sys.argv[1:])


def env_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the argument parser of `accelerate env`."""
    what = "Show versions, devices and configuration, to paste into an issue."
    if subparsers is not None:
        parser = subparsers.add_parser("env", description=what)
        parser.set_defaults(func=env_command)
    else:
        parser = CustomArgumentParser("accelerate env", description=what)
    parser.add_argument("--config_file", help="read this config file")
    made: argparse.ArgumentParser = parser
    return made


def env_command(args: argparse.Namespace) -> dict[str, Any]:
    """Print the lines that issue templates ask for, and return their values by name."""
    info = _facts()
    config = _config(args.config_file)
    print("\nPaste these lines into your issue:\n")
    print("\n".join(f"- {name}: {value}" for name, value in info.items()))
    print(f"- `Accelerate` {'default config' if args.config_file is None else 'config passed'}:")
    if isinstance(config, str):
        print(f"\t{config}")
    else:
        print("\n".join(f"\t- {name}: {value}" for name, value in config.items()))
    return {**info, "`Accelerate` configs": config}


def _facts() -> dict[str, str]:
    device = torch.accelerator.current_accelerator(check_available=True)
    kind = device.type if device is not None else "cpu"
    facts = {
        "`Accelerate` version": f"{VERSION} (served by accelerate-core {core_version})",
        "Platform": platform.platform(),
        "`accelerate` bash location": which(NAME) or "Not found",
        "Python version": platform.python_version(),
        "Numpy version": numpy.__version__,
        "PyTorch version": metadata.version("torch"),
        "PyTorch accelerator": _KINDS.get(kind, kind.upper()),
        "System RAM": f"{psutil.virtual_memory().total / 2**30:.2f} GB",
    }
    name_of = getattr(torch.get_device_module(kind), "get_device_name", None)
    if kind != "cpu" and name_of is not None:
        facts[f"{'GPU' if kind == 'cuda' else kind.upper()} type"] = name_of()
    return facts


def _config(config_file: str | None) -> dict[str, Any] | str:
    path = Path(config_file or os.environ.get(CONFIG_VARIABLE) or default_config())
    if config_file is None and not path.is_file():
        return "Not found"
    return load_config_from_file(str(path)).to_dict()
