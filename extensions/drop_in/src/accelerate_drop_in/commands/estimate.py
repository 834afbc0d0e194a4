"""`accelerate estimate-memory`, and functions that return its numbers."""

from __future__ import annotations

import argparse
from typing import Any

from accelerate_big_model.estimate import largest_layer, shapes_of
from accelerate_core.plugin import ConfigurationError, did_you_mean, listing
from accelerate_drop_in.commands import run
from accelerate_drop_in.commands.arguments import CustomArgumentParser

#: How many times smaller each dtype is than float32.
_SHRINK = {"float32": 1, "float16": 2, "int8": 4, "int4": 8}


def main() -> None:
    """Run `accelerate-core estimate-memory`."""
    run("estimate-memory")


def add_timm_hub_prefix(model_name: str) -> str:
    """Return a model's name in timm's form, with `hf-hub:` before names on the Hub."""
    return f"hf-hub:{model_name}" if "/" in model_name and ":" not in model_name else model_name


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the argument parser of `accelerate estimate-memory`."""
    what = "Show how much memory a model needs."
    if subparsers is not None:
        parser = subparsers.add_parser("estimate-memory", description=what)
        parser.set_defaults(func=estimate_command)
    else:
        parser = CustomArgumentParser("accelerate estimate-memory", description=what)
    parser.add_argument("model_name", help="a checkpoint, its folder, or a name on the Hub")
    parser.add_argument("--library_name", help="accepted for compatibility; has no effect")
    parser.add_argument(
        "--dtypes", nargs="+", default=[*_SHRINK], choices=[*_SHRINK], help="dtypes of the weights"
    )
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="run code from the model's folder"
    )
    made: argparse.ArgumentParser = parser
    return made


def estimate_training_usage(
    bytes: int, mixed_precision: str, msamp_config: str | None = None
) -> dict[str, int]:
    """Return the memory that training with Adam needs, without activations.

    Args:
        bytes: the size of the weights in float32.
        mixed_precision: the dtype of the computation.
        msamp_config: not supported.

    Returns:
        The bytes of model, gradients and optimizer, and of a whole step; -1 if the dtype can't be
        trained.
    """
    if mixed_precision == "float32":
        return {"model": bytes, "optimizer": bytes * 2, "gradients": bytes, "step": bytes * 4}
    if mixed_precision in ("float16", "bfloat16", "fp8") and msamp_config is None:
        gradients = bytes + bytes // 2
        return {
            "model": bytes,
            "optimizer": bytes * 2,
            "gradients": gradients,
            "step": bytes * 2,
        }
    return dict.fromkeys(("model", "optimizer", "gradients", "step"), -1)


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """Return a row for each dtype: its name, and the bytes of the largest layer, the model and training.

    Raises:
        ConfigurationError: the model or a dtype is unknown.
    """
    shapes = shapes_of(args.model_name, trust_remote_code=args.trust_remote_code)
    total = sum(shapes.values()) * 4
    (_, largest) = largest_layer(shapes)
    rows: list[list[Any]] = []
    for dtype in args.dtypes:
        if dtype not in _SHRINK:
            raise ConfigurationError(
                f"dtypes: {dtype!r} is not one of {listing(_SHRINK)}.{did_you_mean(dtype, _SHRINK)}"
            )
        part = _SHRINK[dtype]
        usage = estimate_training_usage(total, dtype)
        rows.append([dtype, largest * 4 / part, total / part, usage])
    return rows


def estimate_command(args: argparse.Namespace) -> None:
    """Run `accelerate estimate-memory` with parsed arguments."""
    words = [args.model_name, "--dtypes", ",".join(args.dtypes)]
    words += ["--trust_remote_code"] if args.trust_remote_code else []
    from accelerate_launch.cli import cli

    try:
        cli.main(args=["estimate-memory", *words], prog_name="accelerate")
    except SystemExit as end:
        if end.code:
            raise
