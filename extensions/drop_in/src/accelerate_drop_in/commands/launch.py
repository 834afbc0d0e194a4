"""`accelerate launch`, and its launchers for programs that parse the options themselves."""

from __future__ import annotations

import argparse
import subprocess

from accelerate_core.plugin import find
from accelerate_drop_in.commands import run
from accelerate_drop_in.commands.parsers import launch_command
from accelerate_drop_in.enums import DynamoBackend
from accelerate_drop_in.launching import prepare_simple_launcher_cmd_env

DYNAMO_BACKENDS = [str(one) for one in DynamoBackend.list()]


def main() -> None:
    """Run `accelerate-core launch`."""
    run("launch")


def clean_option(option: str) -> str | None:
    """Return the name of an option, None if the text is not an option."""
    return option[2:].replace("-", "_") if option.startswith("--") else None


def simple_launcher(args: argparse.Namespace) -> None:
    """Launch according to `args`, and wait until the processes end.

    Raises:
        subprocess.CalledProcessError: the launch failed.
    """
    if hasattr(args, "arguments"):
        launch_command(args)
        return
    command, environment = prepare_simple_launcher_cmd_env(args)
    subprocess.run(command, env=environment, check=True)


multi_gpu_launcher = simple_launcher
deepspeed_launcher = simple_launcher


def tpu_launcher(args: argparse.Namespace) -> None:
    """Launch according to `args` on the TPUs of this host, and wait until the processes end.

    Raises:
        MissingPluginError: the launcher for TPUs is not installed.
        subprocess.CalledProcessError: the launch failed.
    """
    find("launcher", "tpu", source="tpu_launcher")
    args.tpu = True
    simple_launcher(args)


def tpu_pod_launcher(args: argparse.Namespace) -> None:
    """Launch according to `args` on all hosts of a TPU pod, and wait until the processes end.

    Raises:
        MissingPluginError: the launcher for TPUs is not installed.
        subprocess.CalledProcessError: the launch failed.
    """
    args.tpu_use_cluster = True
    tpu_launcher(args)
