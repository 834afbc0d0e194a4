"""Checkpoints of accelerate-core on any fsspec file system."""

from accelerate_fsspec.checkpointer import FsspecCheckpointer
from accelerate_fsspec.settings import FsspecSettings
from accelerate_fsspec.storage import FsspecStorage

__all__ = ["FsspecCheckpointer", "FsspecSettings", "FsspecStorage"]
__version__ = "0.1.0"
