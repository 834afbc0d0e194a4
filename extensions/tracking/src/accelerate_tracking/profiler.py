"""Run `torch.profiler` from settings, and write one Chrome trace per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from accelerate_core.plugin import (
    ConfigurationError,
    KwargsHandler,
    did_you_mean,
    listing,
    option,
    settings,
    warn,
)

_SCHEDULE = ("wait", "warmup", "active", "repeat", "skip_first", "skip_first_wait")


@settings
class ProfileKwargs(KwargsHandler):
    """How `Accelerator.profile` builds `torch.profiler.profile`."""

    activities: list[str] | None = option(
        default=None, help="'cpu', 'cuda', ... Default: all available"
    )
    schedule_option: dict[str, int] | None = option(
        default=None, help="wait, warmup, active, repeat, skip_first"
    )
    on_trace_ready: Callable[..., Any] | None = option(
        default=None, help="called when a trace is complete"
    )
    record_shapes: bool = option(default=False, help="record input shapes")
    profile_memory: bool = option(default=False, help="record allocations")
    with_stack: bool = option(default=False, help="record source lines")
    with_flops: bool = option(default=False, help="estimate floating point operations")
    with_modules: bool = option(default=False, help="record the module hierarchy")
    output_trace_dir: str | None = option(
        default=None, help="directory for Chrome traces, one per rank"
    )

    def build(self) -> torch.profiler.profile:
        """Build the torch profiler that these settings describe."""
        return build_profiler(self)


def build_profiler(
    settings: ProfileKwargs, on_trace_ready: Callable[[Any], Any] | None = None
) -> torch.profiler.profile:
    """Build the torch profiler that the settings describe.

    Args:
        settings: what to record.
        on_trace_ready: replaces `settings.on_trace_ready`.

    Raises:
        ConfigurationError: an activity or a key of `schedule_option` is unknown,
            or `active` is missing.
    """
    return torch.profiler.profile(
        activities=_activities(settings.activities),
        schedule=_schedule(settings.schedule_option),
        on_trace_ready=on_trace_ready or settings.on_trace_ready,
        record_shapes=settings.record_shapes,
        profile_memory=settings.profile_memory,
        with_stack=settings.with_stack,
        with_flops=settings.with_flops,
        with_modules=settings.with_modules,
    )


@contextmanager
def profile(
    settings: ProfileKwargs | None = None, process_index: int = 0
) -> Iterator[torch.profiler.profile]:
    """Profile the block and yield the torch profiler.

    If `output_trace_dir` is set, a Chrome trace `profile_{process_index}.json` is written there,
    even if the block raises. If a schedule completes several cycles, each gets its own file: the
    second is `profile_{process_index}_cycle1.json`. `on_trace_ready` is called before the trace is
    written.

    Args:
        settings: what to record, and where to write it. The default is the default of torch.
        process_index: the rank, used in the file name.

    Example:
        from accelerate_core import ProfileKwargs

        with profile(ProfileKwargs(output_trace_dir="traces")) as profiler:
            loss_function(model(x), y).backward()
        print(profiler.key_averages().table(row_limit=5))
    """
    settings = settings or ProfileKwargs()
    if settings.output_trace_dir is None:
        with build_profiler(settings) as profiler:
            yield profiler
        return
    # Created before the block, so that an unusable directory fails early.
    directory = Path(settings.output_trace_dir)
    directory.mkdir(parents=True, exist_ok=True)
    cycles = count()

    def export(profiler: torch.profiler.profile) -> None:
        if settings.on_trace_ready is not None:
            settings.on_trace_ready(profiler)
        cycle = next(cycles)
        suffix = f"_cycle{cycle}" if cycle else ""
        _write(profiler, directory / f"profile_{process_index}{suffix}.json")

    with build_profiler(settings, export) as profiler:
        yield profiler
    if not next(cycles):
        warn(
            f"No trace was written to {directory}, because the schedule "
            f"{dict(settings.schedule_option or {})} reached no active step. Call profiler.step() "
            "after each training step, and run more steps than wait + warmup.",
        )


def _write(profiler: torch.profiler.profile, path: Path) -> None:
    try:
        profiler.export_chrome_trace(str(path))
    except RuntimeError as error:
        # torch discards a trace after it was saved once.
        if "already saved" not in str(error):
            raise
        warn(
            f"{path} was not written: on_trace_ready has already exported the trace, and torch "
            "can only export it once. Remove output_trace_dir or that export.",
        )


def _activities(names: Iterable[Any] | None) -> list[Any] | None:
    if names is None:
        return None
    known = {name.lower(): member for name, member in ProfilerActivity.__members__.items()}
    chosen = []
    for one in [names] if isinstance(names, str) else names:
        name = str(getattr(one, "name", one)).lower()
        if name not in known:
            raise ConfigurationError(
                f"ProfileKwargs(activities=...): this version of torch has no activity {one!r}. "
                f"The activities are {listing(known)}.{did_you_mean(name, known)}"
            )
        chosen.append(known[name])
    return chosen


def _schedule(options: Mapping[str, int] | None) -> Callable[[int], Any] | None:
    if not options:
        return None
    try:
        return torch.profiler.schedule(**{"wait": 0, "warmup": 0, **options})
    except (TypeError, AssertionError) as error:
        unknown = next(iter(set(options).difference(_SCHEDULE)), "")
        raise ConfigurationError(
            f"ProfileKwargs(schedule_option={dict(options)}): {error}. The keys are "
            f"{listing(_SCHEDULE)}. 'active', the number of steps to record, must be at least "
            f"1.{did_you_mean(unknown, _SCHEDULE)}"
        ) from None
