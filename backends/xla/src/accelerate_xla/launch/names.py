"""Functions of Hugging Face Accelerate for launches on TPUs."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from accelerate_core.plugin import MissingPluginError, pip_command


def install_xla(upgrade: bool = False) -> NoReturn:
    """Raise an error that says how to install torch_xla.

    Accelerate's function downloads wheels that no longer exist.

    Args:
        upgrade: ignored, for compatibility with Accelerate.

    Raises:
        MissingPluginError: always, with the pip command.
    """
    raise MissingPluginError(
        "The wheels for Colab that install_xla downloaded no longer exist. Install torch_xla from "
        'PyPI, with the torch of the same version: pip install "torch==2.9.*" '
        f'"torch_xla[tpu]==2.9.*". Or install this package: {pip_command("xla")}'
    )


def prepare_tpu(
    args: argparse.Namespace, current_env: dict[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Return the options of a launch, and the environment for its processes.

    Args:
        args: options of `launch` as attributes.
        current_env: the environment. Variables are added to it.
        pod: whether to launch on the hosts of a pod, which `tpu_vm` and `tpu_name` name.
    """

    def value_of(name: str) -> Any:
        return getattr(args, name, None)

    current_env.setdefault("PJRT_DEVICE", "TPU")
    current_env["ACCELERATE_BACKEND"] = "xla"
    if value_of("mixed_precision"):
        current_env["ACCELERATE_MIXED_PRECISION"] = str(value_of("mixed_precision"))
    if value_of("downcast_bf16"):
        current_env["ACCELERATE_DOWNCAST_BF16"] = "true"
    if value_of("debug"):
        current_env["ACCELERATE_DEBUG_MODE"] = "true"
    if pod:
        args.vm = value_of("tpu_vm")
        args.tpu = value_of("tpu_name")
    return args, current_env
