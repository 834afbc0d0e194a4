"""Dispatched loaders: rank 0 reads, and every rank receives its part of each batch, one step ahead."""

from accelerate_dispatch.protocol import DispatchError
from accelerate_dispatch.sending import dispatch_steps
from accelerate_dispatch.source import DispatchedSource

__all__ = ["DispatchError", "DispatchedSource", "dispatch_steps"]
