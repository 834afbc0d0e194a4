"""`accelerate tpu-config`: run commands on every host of a TPU pod with gcloud."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from accelerate_core.plugin import ConfigurationError
from accelerate_drop_in.commands.arguments import CustomArgumentParser, run_own
from accelerate_drop_in.commands.config_files import default_config, load_config_from_file

_WHAT = "Run commands on every host of a TPU pod, such as to set it up before a launch."
#: Options that may be in a config file instead, each with its key.
_IN_FILE = {"tpu_name": "tpu_name", "tpu_zone": "tpu_zone"}


def main() -> None:
    """Run `accelerate tpu-config`."""
    run_own(tpu_command_parser(), tpu_command_launcher, sys.argv[1:])


def tpu_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the argument parser of `accelerate tpu-config`."""
    if subparsers is not None:
        parser = subparsers.add_parser("tpu-config", description=_WHAT)
        parser.set_defaults(func=tpu_command_launcher)
    else:
        parser = CustomArgumentParser("accelerate tpu-config", description=_WHAT)
    add = parser.add_argument
    add("--config_file", help="file with values for options that are not given")
    add("--tpu_name", help="name of the TPU in gcloud")
    add("--tpu_zone", help="zone of the TPU")
    add("--use_alpha", action="store_true", help="run gcloud alpha instead of gcloud")
    add("--command_file", help="file with one command per line")
    add("--command", action="append", nargs="+", help="a command; can be given several times")
    add("--install_accelerate", action="store_true", help="first run pip install accelerate")
    add("--accelerate_version", default="latest", help="version to install, or latest")
    add("--debug", action="store_true", help="print the command without running it")
    made: argparse.ArgumentParser = parser
    return made


def tpu_command_launcher(args: argparse.Namespace) -> None:
    """Run the commands from `args` and the config file on all hosts.

    Raises:
        ConfigurationError: there are no commands, or no TPU is named.
    """
    command = "; ".join(["cd /usr/share", *_commands(args)])
    missing = [f"--{name}" for name in _IN_FILE if not getattr(args, name)]
    if missing:
        raise ConfigurationError(
            f"tpu-config needs {' and '.join(missing)}, or the same keys in a config file."
        )
    words = ["gcloud", *(["alpha"] if args.use_alpha else []), "compute", "tpus", "tpu-vm", "ssh"]
    words += [args.tpu_name, "--zone", args.tpu_zone, "--command", command, "--worker", "all"]
    if args.debug:
        print(f"Running {' '.join(words)}")
        return
    status = subprocess.run(words, check=False).returncode
    if status:
        sys.exit(f"The hosts were not set up: gcloud failed with exit status {status}.")
    print("The hosts of the pod are set up.")


def _commands(args: argparse.Namespace) -> list[str]:
    """Return the commands in order, and fill in `args` from the config file."""
    said: Any = None
    if args.config_file is not None or _default_file() is not None:
        said = load_config_from_file(args.config_file)
        for option, key in _IN_FILE.items():
            setattr(args, option, getattr(args, option) or getattr(said, key, None))
    lines = [word for words in args.command or () for word in words]
    file = args.command_file
    if not lines and file is None:
        file = getattr(said, "command_file", None)
        lines = list(getattr(said, "commands", None) or ()) if file is None else []
    if file is not None:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    if not lines:
        raise ConfigurationError(
            "There is nothing to run on the hosts. Pass --command or --command_file, or set commands "
            "or command_file in a config file."
        )
    if args.install_accelerate:
        lines.insert(0, f"pip install {_package(args.accelerate_version)}")
    return lines


def _default_file() -> Path | None:
    from accelerate_core.config.files import CONFIG_VARIABLE

    path = Path(os.environ.get(CONFIG_VARIABLE) or default_config())
    return path if path.is_file() else None


def _package(version: str) -> str:
    if version == "dev":
        raise ConfigurationError(
            "--accelerate_version dev is not supported. Pass a version, or install from a clone with "
            '--command "pip install ...".'
        )
    return "accelerate -U" if version == "latest" else f"accelerate=={version}"
