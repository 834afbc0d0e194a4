"""Saving and loading: models for others, and states to go on from.

What is public here serves other checkpointers, too.
"""

from accelerate_checkpoint.checkpointer import DirectoryCheckpointer
from accelerate_checkpoint.model import load_weights, save_object, save_weights
from accelerate_checkpoint.preemption import Preempted, Preemption, read_signals
from accelerate_checkpoint.replay import CycleStart
from accelerate_checkpoint.shards import SafeReader, read_metadata

__all__ = [
    "CycleStart",
    "DirectoryCheckpointer",
    "Preempted",
    "Preemption",
    "SafeReader",
    "load_weights",
    "read_metadata",
    "read_signals",
    "save_object",
    "save_weights",
]
