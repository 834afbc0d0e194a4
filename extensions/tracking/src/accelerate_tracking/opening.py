"""How a tracker that was asked for is built."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from accelerate_tracking.choice import Asked, check_arguments, name_of
from accelerate_tracking.tracker import GeneralTracker, RunGroup

__all__ = ["InitKwargs", "builder", "is_for_every_rank"]

InitKwargs = Mapping[str, Mapping[str, Any]]


def is_for_every_rank(item: Asked, init_kwargs: InitKwargs) -> bool:
    """Tell whether a tracker runs on the other ranks too: by its class, or by `init_kwargs`."""
    declared = getattr(item, "main_process_only", True)
    wanted = init_kwargs.get(name_of(item), {}).get("main_process_only", declared)
    return wanted is False


def builder(
    item: Asked,
    project_name: str,
    logging_dir: str | os.PathLike[str] | None,
    init_kwargs: InitKwargs,
    place: tuple[int, int],
) -> Callable[[], GeneralTracker]:
    """Return how to get a tracker, with its arguments already checked.

    Args:
        place: rank and size of the world.

    Raises:
        ConfigurationError: its constructor does not take the arguments.
    """
    keywords = dict(init_kwargs.get(name_of(item), {}))
    keywords.pop("main_process_only", None)
    group = None
    if is_for_every_rank(item, init_kwargs):
        group = RunGroup(_group_name(project_name), *place)
    positional: tuple[Any, ...] = (project_name,)
    if isinstance(item, type):
        if item.requires_logging_directory is True:
            positional += (logging_dir,)
        check_arguments(item, positional, keywords)

    def build() -> GeneralTracker:
        tracker = item(*positional, **keywords) if isinstance(item, type) else item
        if group is not None:
            tracker.main_process_only = False
            tracker.run_group = group
        return tracker

    return build


def _group_name(project: str) -> str:
    """Return a name all ranks of this start come to without talking, and no other start has."""
    parts = [os.environ.get(v, "") for v in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
    return f"{project}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:8]}"
