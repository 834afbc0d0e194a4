"""Checkpoints on any file system of fsspec, for accelerate-core."""

from accelerate_fsspec.checkpointer import FsspecCheckpointer
from accelerate_fsspec.settings import FsspecSettings

__all__ = ["FsspecCheckpointer", "FsspecSettings"]
__version__ = "0.1.0"
