"""`save_state` directories of Hugging Face Accelerate 1.x: recognised, and read without pickle."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from accelerate_checkpoint import files
from accelerate_checkpoint.manifest import MANIFEST, MARK
from accelerate_core.errors import CheckpointError

__all__ = ["NOT_TAKEN_OVER", "numpy_globals", "why_not"]

NOT_TAKEN_OVER = (
    "{directory} was written by Hugging Face Accelerate and has no checksums. Models, optimizers, "
    "schedulers, scaler, registered objects and random states were taken over; the position in "
    "the data was not: use skip_first_batches for the epoch that was begun."
)


def why_not(directory: Path) -> str:
    """Return why a directory without a manifest cannot be loaded, "" if it is the peer's."""
    ours = (
        f"{directory / MANIFEST} is missing: the checkpoint is not whole, or was tampered with, "
        "and is not loaded."
    )
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                if MARK in (file.metadata() or {}):
                    return ours
        except (SafetensorError, OSError) as error:
            return f"{path} cannot be read: {files.first_line(error)}"
    states = directory / f"{files.RNG}_0.pkl"
    if not states.is_file():
        return (
            f"{directory} is no checkpoint: it has neither {MANIFEST} (ours) nor {states.name} "
            "(Hugging Face Accelerate's)."
        )
    try:
        found = files.read(states, allowed=numpy_globals())
    except CheckpointError as error:
        return str(error)
    if not isinstance(found, dict) or MARK in found or "random_state" not in found:
        return ours
    return ""


def numpy_globals() -> AbstractContextManager[Any]:
    """Allow NumPy's arrays of numbers while a file is read: the peer keeps generators as such."""
    try:
        import numpy
    except ImportError:
        return torch.serialization.safe_globals([])
    core: Any = getattr(numpy, "_core", None) or numpy.core
    allowed: list[Any] = [numpy.ndarray, numpy.dtype, numpy.dtypes.UInt32DType]
    rebuild = core.multiarray._reconstruct
    allowed += [
        (rebuild, "numpy.core.multiarray._reconstruct"),
        (rebuild, "numpy._core.multiarray._reconstruct"),
    ]
    return torch.serialization.safe_globals(allowed)
