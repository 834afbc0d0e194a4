"""Where checkpoints go, and how they are transferred."""

from __future__ import annotations

import json
from typing import Any

from accelerate_core.plugin import ConfigurationError, KwargsHandler, option, settings
from accelerate_object_store.redaction import Options


def _read_options(text: str, variable: str) -> dict[str, Any]:
    """Parse JSON. The error doesn't contain the text, because it may hold credentials."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigurationError(
            f"{variable or 'options'} must be a JSON object, such as "
            '{"endpoint": "http://127.0.0.1:9000"}.'
        )
    return found


@settings
class ObjectStoreSettings(KwargsHandler):
    """Where checkpoints go, and how they are transferred."""

    url: str | None = option(
        default=None,
        help="where relative targets and numbered checkpoints go; default: project_dir",
    )
    options: dict[str, Any] = option(
        default_factory=dict,
        help="options of the store, such as endpoint and region; hidden when settings are shown",
        read=_read_options,
        per_rank=True,
    )
    part_size: int = option(
        default=8 << 20, help="bytes per part of a large file", ge=5 << 20, per_rank=True
    )
    parallel: int = option(default=8, help="transfers at the same time", ge=1, per_rank=True)
    attempts: int = option(default=5, help="attempts of each request", ge=1, per_rank=True)

    def __post_init__(self) -> None:
        self.options = Options(self.options)
