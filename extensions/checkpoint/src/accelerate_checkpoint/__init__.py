"""Saving and loading: models for others, and states to go on from."""

from accelerate_checkpoint.checkpointer import DirectoryCheckpointer
from accelerate_checkpoint.model import save_weights
from accelerate_checkpoint.preemption import Preempted, read_signals
from accelerate_checkpoint.shards import SafeReader, read_metadata

__all__ = [
    "DirectoryCheckpointer",
    "Preempted",
    "SafeReader",
    "read_metadata",
    "read_signals",
    "save_weights",
]
