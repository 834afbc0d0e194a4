"""What users may say about DiLoCo."""

from __future__ import annotations

from accelerate_core.plugin import BackendSettings, option, settings


@settings(argument="diloco_plugin")
class DiLoCoSettings(BackendSettings):
    """How often the ranks meet, and what they do with the average of where they went."""

    sync_every: int = option(default=8, help="inner steps between two outer steps", ge=1)
    outer_lr: float = option(default=0.7, help="rate of the outer step", gt=0)
    outer_momentum: float = option(default=0.9, help="momentum of the outer step", ge=0, lt=1)
    nesterov: bool = option(default=True, help="look ahead in the outer step")
