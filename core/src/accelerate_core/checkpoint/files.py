"""One file at a time: written beside, then renamed; read without running anything."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from accelerate_core.errors import CheckpointError

__all__ = [
    "CUSTOM",
    "MODEL",
    "OPTIMIZER",
    "RNG",
    "SAMPLER",
    "SCALER",
    "SCHEDULER",
    "numbered",
    "read",
    "write",
]

MODEL, OPTIMIZER, SCHEDULER, SAMPLER = "model", "optimizer", "scheduler", "sampler"
SCALER, RNG, CUSTOM = "scaler.pt", "random_states", "custom_checkpoint"


def numbered(stem: str, index: int, suffix: str) -> str:
    """Return `stem.suffix`, `stem_1.suffix`, `stem_2.suffix`, ..."""
    return f"{stem}{f'_{index}' if index else ''}{suffix}"


def write(path: Path, save: Callable[[Path], None]) -> None:
    """Call `save` on a file beside `path`, then rename: `path` is old or new, never half."""
    beside = path.with_name(f".{path.name}.writing")
    try:
        save(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def read(path: Path, *, trust: bool = False, **options: Any) -> Any:
    """Load a file torch has written, tensors and plain containers only.

    Args:
        trust: also run pickled code; only for files you made yourself.

    Raises:
        CheckpointError: the file is missing, damaged, or holds more than plain data.
    """
    options.setdefault("map_location", "cpu")
    try:
        return torch.load(path, weights_only=not trust, **options)
    except FileNotFoundError:
        raise CheckpointError(f"The checkpoint {path.parent} has no {path.name}.") from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is damaged or holds Python objects, which are not loaded unless you say so: "
            f"pass trust=True to load_state if you wrote this checkpoint yourself. ({_first_line(error)})"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
