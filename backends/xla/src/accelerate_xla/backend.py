"""The backend."""

from __future__ import annotations

from accelerate_core import Backend
from accelerate_xla.settings import XLAPlugin


class XLABackend(Backend):
    """Trains on XLA devices."""

    name = "xla"
    api_version = (1, 0)
    reduces_gradients = "step"
    Settings = XLAPlugin
