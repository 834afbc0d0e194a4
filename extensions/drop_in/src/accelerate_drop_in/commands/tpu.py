"""`accelerate tpu-config`."""

from __future__ import annotations

from accelerate_drop_in.commands import run


def main() -> None:
    """Run `accelerate-core tpu-config`."""
    run("tpu-config")
