"""The Accelerator of scripts that were written for the original."""

from __future__ import annotations

from typing import Any

from accelerate_core import accelerator


class Accelerator(accelerator.Accelerator):
    """accelerate-core's, with the one default that the original's scripts count on.

    They skip by themselves what was seen of an epoch, so `load_state` leaves the loaders at its
    beginning, unless `restore_positions` or `use_stateful_dataloader` asks for more.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.dataloader_config
        if config.restore_positions is None:
            config.restore_positions = config.use_stateful_dataloader


Accelerator.__init__.__wrapped__ = accelerator.Accelerator.__init__  # type: ignore[attr-defined]
