"""What users may say about the reading of records."""

from __future__ import annotations

from accelerate_core.plugin import KwargsHandler, option, settings


@settings
class RecordsSettings(KwargsHandler):
    """How records are read."""

    seed: int = option(default=0, help="with the epoch, decides the order of a shuffled loader")
