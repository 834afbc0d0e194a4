"""Saving and loading: models for others, and states to go on from."""

from accelerate_core.checkpoint.model import save_model, save_object
from accelerate_core.checkpoint.state import load_state, save_state

__all__ = ["load_state", "save_model", "save_object", "save_state"]
