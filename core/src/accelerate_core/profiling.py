"""`torch.profiler` from settings, with one Chrome trace per rank."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate_core.errors import ConfigurationError, did_you_mean, listing

if TYPE_CHECKING:
    import torch


_FLAGS = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")
_SCHEDULE = ("wait", "warmup", "active", "repeat", "skip_first", "skip_first_wait")


def build_profiler(
    settings: Any = None, on_trace_ready: Callable[[Any], Any] | None = None
) -> torch.profiler.profile:
    """Build the torch profiler that the settings describe.

    Args:
        settings: a `ProfileKwargs`, or None for torch's defaults.
        on_trace_ready: called instead of the settings' own.

    Raises:
        ConfigurationError: an activity or a key of `schedule_option` is unknown,
            or `active` is missing.
    """
    import torch

    flags: dict[str, Any] = {flag: bool(getattr(settings, flag, False)) for flag in _FLAGS}
    return torch.profiler.profile(
        activities=_activities(getattr(settings, "activities", None)),
        schedule=_schedule(getattr(settings, "schedule_option", None)),
        on_trace_ready=on_trace_ready or getattr(settings, "on_trace_ready", None),
        **flags,
    )


@contextmanager
def profile(settings: Any = None, process_index: int = 0) -> Iterator[torch.profiler.profile]:
    """Profile the block and yield the torch profiler.

    With `output_trace_dir` a Chrome trace `profile_{process_index}.json` is
    written there, also when the block raises. A schedule that completes several
    cycles writes each: the second is `profile_{process_index}_cycle1.json`.
    `on_trace_ready` is called before the trace is written.

    Args:
        settings: a `ProfileKwargs`, or None for torch's defaults.
        process_index: rank, the number in the file's name.

    Example:
        with profile(ProfileKwargs(output_trace_dir="traces")) as profiler:
            train()
        print(profiler.key_averages().table())
    """
    directory = getattr(settings, "output_trace_dir", None)
    if directory is None:
        with build_profiler(settings) as profiler:
            yield profiler
        return
    export = _Export(
        Path(os.fspath(directory)), process_index, getattr(settings, "on_trace_ready", None)
    )
    # Made before the block: a directory that cannot be written is known at once.
    export.directory.mkdir(parents=True, exist_ok=True)
    with build_profiler(settings, export) as profiler:
        yield profiler
    if not export.cycles:
        warnings.warn(
            f"No trace was written to {export.directory}: the schedule "
            f"{dict(settings.schedule_option or {})} reached no active step. Call profiler.step() "
            f"after each training step, and run more steps than wait + warmup.",
            stacklevel=3,
        )


class _Export:
    """Writes each complete trace; the user's own handler sees it first."""

    def __init__(
        self, directory: Path, process_index: int, handler: Callable[[Any], Any] | None
    ) -> None:
        self.directory = directory
        self.cycles = 0
        self._process_index = process_index
        self._handler = handler

    def __call__(self, profiler: torch.profiler.profile) -> None:
        if self._handler is not None:
            self._handler(profiler)
        cycle = f"_cycle{self.cycles}" if self.cycles else ""
        self.cycles += 1
        path = self.directory / f"profile_{self._process_index}{cycle}.json"
        try:
            profiler.export_chrome_trace(str(path))
        except RuntimeError as error:
            # torch lets go of a trace once it has been saved.
            if self._handler is None or "already saved" not in str(error):
                raise
            warnings.warn(
                f"{path} is not written: on_trace_ready has already exported the trace, and torch "
                f"exports one only once. Leave out output_trace_dir or that export.",
                stacklevel=2,
            )


def _activities(names: Iterable[Any] | None) -> list[Any] | None:
    from torch.profiler import ProfilerActivity

    if names is None:
        return None
    known = {name.lower(): member for name, member in ProfilerActivity.__members__.items()}
    chosen = []
    for name in [names] if isinstance(names, str) else names:
        if isinstance(name, ProfilerActivity):
            chosen.append(name)
        elif str(name).lower() in known:
            chosen.append(known[str(name).lower()])
        else:
            raise ConfigurationError(
                f"ProfileKwargs(activities=...): {name!r} is not an activity of this torch; "
                f"there is {listing(known)}.{did_you_mean(str(name), known)}"
            )
    return chosen


def _schedule(options: Mapping[str, int] | None) -> Callable[[int], Any] | None:
    import torch

    if not options:
        return None
    for key in options:
        if key not in _SCHEDULE:
            raise ConfigurationError(
                f"ProfileKwargs(schedule_option=...): unknown key {key!r}; there is "
                f"{listing(_SCHEDULE)}.{did_you_mean(key, _SCHEDULE)}"
            )
    if options.get("active", 0) < 1:
        raise ConfigurationError(
            "ProfileKwargs(schedule_option=...) needs 'active': how many steps to record, "
            "at least 1."
        )
    return torch.profiler.schedule(**{"wait": 0, "warmup": 0, **options})
