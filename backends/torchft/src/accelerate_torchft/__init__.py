"""torchft for accelerate-core."""

from accelerate_torchft.settings import TorchFTKwargs

__all__ = ["TorchFTKwargs"]
__version__ = "0.1.0"
