"""A hint for attributes of the user's model that the wrapper of a prepared model doesn't have."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from accelerate_core.plugin import running


def add_attribute_hint(error: BaseException | None) -> None:
    """Add a note to an AttributeError that reads an attribute of the user's model from its wrapper.

    Python itself records the object and the name in the exception, so training is not slowed down. The
    exceptions that led to this one are checked as well.
    """
    runtime, torch = running(), sys.modules.get("torch")
    if runtime is None or torch is None:
        return
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        model = getattr(error, "obj", None) if isinstance(error, AttributeError) else None
        if isinstance(model, torch.nn.Module):
            for reference in runtime.users:
                # A note must never replace the exception that is being reported.
                with contextlib.suppress(Exception):
                    _add_note(error, reference(), model)
        error = error.__cause__ or error.__context__


def _add_note(error: Any, accelerator: Any, model: Any) -> None:
    if accelerator is None or all(model is not one for one in accelerator.models):
        return
    inner = accelerator.unwrap_model(model)
    note = (
        f"prepare() wrapped the {type(inner).__name__} for the backend {accelerator.backend.name!r}. To "
        f"read {error.name!r} of your own model, use accelerator.unwrap_model(model).{error.name}"
    )
    repeated = note in getattr(error, "__notes__", ())
    if inner is not model and hasattr(inner, error.name) and not repeated:
        error.add_note(note)
