"""The settings of DiLoCo."""

from __future__ import annotations

from accelerate_core.plugin import BackendSettings, option, settings


@settings(argument="diloco_plugin")
class DiLoCoSettings(BackendSettings):
    """How often outer steps are taken, and how."""

    sync_every: int = option(default=8, help="inner steps between two outer steps", ge=1)
    outer_lr: float = option(default=0.7, help="learning rate of the outer step", gt=0)
    outer_momentum: float = option(default=0.9, help="momentum of the outer step", ge=0, lt=1)
    nesterov: bool = option(default=True, help="use Nesterov momentum in the outer step")
