"""Saving and loading: models for others, and states to go on from."""

from accelerate_core.checkpoint.checkpointer import DirectoryCheckpointer
from accelerate_core.checkpoint.model import save_weights
from accelerate_core.checkpoint.preemption import Preempted, read_signals
from accelerate_core.checkpoint.shards import SafeReader, read_metadata

__all__ = [
    "DirectoryCheckpointer",
    "Preempted",
    "SafeReader",
    "read_metadata",
    "read_signals",
    "save_weights",
]
