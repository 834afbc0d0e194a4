"""The command `accelerate-core`. It is part of accelerate-launch; without it, print how to install it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from accelerate_core.errors import MissingPluginError
from accelerate_core.plugins.discovery import exported


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    try:
        command_line: Any = exported("command_line")
    except MissingPluginError:
        sys.exit(
            "The accelerate-core command needs accelerate-launch, which is not installed. "
            'Install it with: pip install "accelerate-core[standard]"'
        )
    command_line.main(args=arguments, prog_name="accelerate-core")


if __name__ == "__main__":
    main()
