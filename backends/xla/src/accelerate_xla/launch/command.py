"""`accelerate-core tpu-config`."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click

from accelerate_core.plugin import ConfigurationError, Sources, resolve_settings
from accelerate_launch import default_config_path
from accelerate_xla.launch.pod import CONFIG, gcloud
from accelerate_xla.launch.settings import TPUPod

_PACKAGE = "accelerate-core[xla]"


def _underscores(name: str) -> str:
    return name.replace("-", "_")


@click.command(
    "tpu-config",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": _underscores,
    },
)
@click.option("--config_file", metavar="FILE", help="YAML file with what is not given here")
@click.option("--tpu_name", help="name of the TPU, as gcloud knows it")
@click.option("--tpu_zone", help="zone of the TPU")
@click.option("--use_alpha", is_flag=True, help="run gcloud alpha instead of gcloud")
@click.option(
    "--command", "commands", multiple=True, help="command for the hosts; several in order"
)
@click.option("--command_file", metavar="FILE", help="file of commands")
@click.option("--install_accelerate", is_flag=True, help=f"install {_PACKAGE} there first")
@click.option("--accelerate_version", default="latest", help="version of it; default: the latest")
@click.option("--debug", is_flag=True, help="print what would be run, and run nothing")
def command(
    config_file: str | None,
    tpu_name: str | None,
    tpu_zone: str | None,
    use_alpha: bool,
    commands: tuple[str, ...],
    command_file: str | None,
    install_accelerate: bool,
    accelerate_version: str,
    debug: bool,
) -> None:
    """Run commands on every host of a TPU pod, to set it up.

    They run one after the other in /usr/share, and the first that fails ends them. What is not given
    is read from the config file: tpu_name, tpu_zone, commands, command_file.
    """
    said = _settings(config_file)
    file = command_file or (None if commands else said.command_file)
    lines = list(commands or (said.commands or () if file is None else ()))
    if file is not None:
        lines += _read(file)
    if install_accelerate:
        lines.insert(
            0, shlex.join([*["python3", "-m", "pip", "install"], *_package(accelerate_version)])
        )
    if not lines:
        raise ConfigurationError(
            "There is nothing to run on the hosts: give --command or --command_file (in a config "
            "file: commands or command_file), or --install_accelerate."
        )
    text = "\n".join(["set -e", "cd /usr/share", *lines])
    words = gcloud(tpu_name or said.tpu_name, tpu_zone or said.tpu_zone, text, alpha=use_alpha)
    if debug:
        click.echo(f"Running {shlex.join(words)}")
        return
    if shutil.which("gcloud") is None:
        raise ConfigurationError(
            "gcloud was not found on this machine: install the Google Cloud CLI, or see with --debug "
            "what it would be given."
        )
    status = subprocess.run(words, check=False).returncode
    if status:
        click.echo(f"The hosts were not set up: gcloud ended with exit status {status}.", err=True)
        sys.exit(status)
    click.echo("The hosts of the pod are set up.")


def _settings(config_file: str | None) -> TPUPod:
    default = default_config_path(os.environ)
    file = config_file or os.environ.get(CONFIG) or (str(default) if default.is_file() else "")
    said: TPUPod = resolve_settings(TPUPod, None, Sources.of({**os.environ, CONFIG: file}))[0]
    return said


def _read(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"Cannot read the command file {file}: {error}.") from None


def _package(version: str) -> list[str]:
    if version == "latest":
        return ["-U", _PACKAGE]
    if version == "dev":
        raise ConfigurationError(
            "--accelerate_version dev is not offered: name a version, or install from a clone with "
            '--command "pip install ...".'
        )
    return [f"{_PACKAGE}=={version}"]
