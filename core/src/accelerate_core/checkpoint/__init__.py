"""Saving and loading: models for others, and states to go on from."""

from accelerate_core.checkpoint.background import Background
from accelerate_core.checkpoint.load import load_state
from accelerate_core.checkpoint.model import save_model, save_object, save_weights
from accelerate_core.checkpoint.preemption import Preempted, Preemption, read_signals
from accelerate_core.checkpoint.replay import Boundary
from accelerate_core.checkpoint.shards import SafeReader, read_metadata
from accelerate_core.checkpoint.state import own_state, save_state

__all__ = [
    "Background",
    "Boundary",
    "Preempted",
    "Preemption",
    "SafeReader",
    "load_state",
    "own_state",
    "read_metadata",
    "read_signals",
    "save_model",
    "save_object",
    "save_state",
    "save_weights",
]
