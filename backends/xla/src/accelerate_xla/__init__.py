"""XLA for accelerate-core. Importing this package doesn't import torch_xla."""

from accelerate_xla.backend import XLABackend
from accelerate_xla.settings import XLAPlugin

__all__ = ["XLABackend", "XLAPlugin"]
