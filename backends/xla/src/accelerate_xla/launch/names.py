"""Names of Accelerate's for launches on TPUs."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from accelerate_core.plugin import MissingPluginError, pip_command


def install_xla(upgrade: bool = False) -> NoReturn:
    """Say how torch_xla is installed: the wheels that Accelerate fetched are not there any more.

    Args:
        upgrade: accepted for Accelerate's callers.

    Raises:
        MissingPluginError: always, with the pip command.
    """
    raise MissingPluginError(
        "install_xla fetched wheels for Colab that are not there any more. torch_xla is on PyPI, "
        'for one torch each: pip install "torch==2.9.*" "torch_xla[tpu]==2.9.*", or with '
        f"this package: {pip_command('xla')}"
    )


def prepare_tpu(
    args: argparse.Namespace, current_env: dict[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Return the options of a launch, and an environment with what its processes have to find.

    Args:
        args: options of `launch` as attributes.
        current_env: the environment, which is added to.
        pod: whether the hosts of a pod are meant, whose names stand in `tpu_vm` and `tpu_name`.
    """

    def said(name: str) -> Any:
        return getattr(args, name, None)

    current_env.setdefault("PJRT_DEVICE", "TPU")
    current_env["ACCELERATE_BACKEND"] = "xla"
    if said("mixed_precision"):
        current_env["ACCELERATE_MIXED_PRECISION"] = str(said("mixed_precision"))
    if said("downcast_bf16"):
        current_env["ACCELERATE_DOWNCAST_BF16"] = "true"
    if said("debug"):
        current_env["ACCELERATE_DEBUG_MODE"] = "true"
    if pod:
        args.vm = said("tpu_vm")
        args.tpu = said("tpu_name")
    return args, current_env
