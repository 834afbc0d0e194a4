"""The settings of the checkpointer."""

from __future__ import annotations

from typing import Any

from accelerate_core.plugin import KwargsHandler, option, settings


@settings
class FsspecSettings(KwargsHandler):
    """Where checkpoints are kept, and options of their file system."""

    url: str | None = option(
        default=None, help="where relative targets and numbered checkpoints go: s3://bucket/run"
    )
    options: dict[str, Any] = option(
        default_factory=dict, help="arguments for the file system, such as endpoint_url"
    )
