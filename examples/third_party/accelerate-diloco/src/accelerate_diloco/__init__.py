"""DiLoCo for accelerate-core."""

from accelerate_diloco.backend import DiLoCoBackend
from accelerate_diloco.settings import DiLoCoSettings

__all__ = ["DiLoCoBackend", "DiLoCoSettings"]
__version__ = "0.1.0"
