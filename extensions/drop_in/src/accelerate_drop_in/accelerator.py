"""The Accelerator of scripts that were written for the original."""

from __future__ import annotations

from typing import Any

from accelerate_core import accelerator

#: What the original takes by position, after what ours does.
_BY_POSITION = (
    *("deepspeed_plugin", "fsdp_plugin", "torch_tp_plugin", "megatron_lm_plugin", "rng_types"),
    *("log_with", "project_dir", "project_config", "gradient_accumulation_plugin"),
    *("step_scheduler_with_optimizer", "kwargs_handlers", "dynamo_backend", "dynamo_plugin"),
    *("deepspeed_plugins", "parallelism_config"),
)
_FIRST = 6


class Accelerator(accelerator.Accelerator):
    """accelerate-core's, with the one default that the original's scripts count on.

    All arguments of the original may be given by position.

    They skip by themselves what was seen of an epoch, so `load_state` leaves the loaders at its
    beginning, unless `restore_positions` or `use_stateful_dataloader` asks for more.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs |= dict(zip(_BY_POSITION, args[_FIRST:], strict=False))
        super().__init__(*args[:_FIRST], **kwargs)
        config = self.dataloader_config
        if config.restore_positions is None:
            config.restore_positions = config.use_stateful_dataloader


Accelerator.__init__.__wrapped__ = accelerator.Accelerator.__init__  # type: ignore[attr-defined]
