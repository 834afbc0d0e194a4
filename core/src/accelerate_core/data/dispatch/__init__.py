"""Dispatching: one rank reads, every rank receives its part, one step ahead."""

from accelerate_core.data.dispatch.prefetch import Dispatch, Reading
from accelerate_core.data.dispatch.protocol import DispatchError
from accelerate_core.data.dispatch.transport import SOURCE

__all__ = ["SOURCE", "Dispatch", "DispatchError", "Reading"]
