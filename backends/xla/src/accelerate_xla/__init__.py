"""XLA for accelerate-core. Importing this does not import torch_xla."""

from accelerate_xla.backend import XLABackend
from accelerate_xla.settings import XLAPlugin

__all__ = ["XLABackend", "XLAPlugin"]
