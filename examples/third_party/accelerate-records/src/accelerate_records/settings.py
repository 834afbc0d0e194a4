"""The settings of the loader factory."""

from __future__ import annotations

from accelerate_core.plugin import KwargsHandler, option, settings


@settings
class RecordsSettings(KwargsHandler):
    """How records are read."""

    seed: int = option(default=0, help="determines the order of shuffled loaders, with the epoch")
