"""The command `accelerate-core tpu-config`."""

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
from accelerate_xla.launch.tpu_settings import TPUPod

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
@click.option(
    "--config_file", metavar="FILE", help="YAML file with options that are not given here"
)
@click.option("--tpu_name", help="name of the TPU in gcloud")
@click.option("--tpu_zone", help="zone of the TPU")
@click.option("--use_alpha", is_flag=True, help="run gcloud alpha instead of gcloud")
@click.option(
    "--command", "commands", multiple=True, help="command to run on the hosts (repeatable)"
)
@click.option("--command_file", metavar="FILE", help="file with one command per line")
@click.option("--install_accelerate", is_flag=True, help=f"first install {_PACKAGE} on the hosts")
@click.option("--accelerate_version", default="latest", help="version to install (default: latest)")
@click.option("--debug", is_flag=True, help="print the command without running it")
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
    """Set up the hosts of a TPU pod by running commands on each of them.

    The commands run in order in /usr/share, and stop at the first that fails. The config file can
    provide tpu_name, tpu_zone, commands and command_file.
    """
    settings = _settings(config_file)
    file = command_file or (None if commands else settings.command_file)
    lines = list(commands or (settings.commands or () if file is None else ()))
    if file is not None:
        lines += _read(file)
    if install_accelerate:
        lines.insert(
            0, shlex.join([*["python3", "-m", "pip", "install"], *_package(accelerate_version)])
        )
    if not lines:
        raise ConfigurationError(
            "There are no commands to run on the hosts. Pass --command or --command_file (in a "
            "config file: commands or command_file), or --install_accelerate."
        )
    text = "\n".join(["set -e", "cd /usr/share", *lines])
    name, zone = tpu_name or settings.tpu_name, tpu_zone or settings.tpu_zone
    words = gcloud(name, zone, text, alpha=use_alpha)
    if debug:
        click.echo(f"Running {shlex.join(words)}")
        return
    if shutil.which("gcloud") is None:
        raise ConfigurationError(
            "gcloud was not found on this machine. Install the Google Cloud CLI. To only print the "
            "command, pass --debug."
        )
    status = subprocess.run(words, check=False).returncode
    if status:
        click.echo(f"The hosts were not set up: gcloud failed with exit status {status}.", err=True)
        sys.exit(status)
    click.echo("The hosts of the pod are set up.")


def _settings(config_file: str | None) -> TPUPod:
    default = default_config_path(os.environ)
    file = config_file or os.environ.get(CONFIG) or (str(default) if default.is_file() else "")
    settings: TPUPod = resolve_settings(TPUPod, None, Sources.of({**os.environ, CONFIG: file}))[0]
    return settings


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
            "--accelerate_version dev is not supported. Name a version, or install from a clone "
            'with --command "pip install ...".'
        )
    return [f"{_PACKAGE}=={version}"]
