"""The extension that starts the watching thread of each rank."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate_core.plugin import AcceleratorView, Claim, Request, hookimpl
from accelerate_watch.settings import DriftError, WatchConfiguration

if TYPE_CHECKING:
    from accelerate_watch.drift import Drift
    from accelerate_watch.stragglers import Stragglers
    from accelerate_watch.watcher import Watcher

#: Seconds that a rank waits before a report, if the process group's timeout is not shorter.
_HANG_AFTER = 60.0


class Watch:
    """Prints which rank is stuck, at which step and collective, and where, before a timeout ends the run.

    Nothing is added to a training step: a thread on each rank reads torch's flight recorder and the
    counters of the training loop.

    Args:
        settings: when a rank counts as stuck or slow.
    """

    name = "watch"
    api_version = (1, 0)
    Settings = WatchConfiguration

    def __init__(self, settings: WatchConfiguration) -> None:
        self._settings = settings
        self._state = "not started"
        self._ends: list[Callable[[], object]] = []
        self._watcher: Watcher | None = None
        self._drift: Drift | None = None
        if settings.hang_after != 0 or settings.straggler_factor:
            from accelerate_watch import recording

            # Before the process group starts. `on_start` removes the variable.
            self._ends.append(recording.request_recording())

    @classmethod
    def detect(cls, request: Request) -> Claim | None:
        """Claim every run of several processes."""
        if request.topology.num_processes < 2:
            return None
        return Claim(0, f"{request.topology.num_processes} processes")

    @hookimpl
    def on_start(self, accelerator: AcceleratorView) -> None:
        """Start the thread."""
        import torch.distributed as dist

        from accelerate_watch import drift, flight_recorder, run_folder, terminate
        from accelerate_watch.report import ABORTS
        from accelerate_watch.watcher import Watcher

        if not dist.is_initialized():
            self._state = "off: torch.distributed is not used"
            return
        hang_after = self._hang_after(accelerator)
        recording = flight_recorder.is_recording()
        flight_recorder.start_recording()
        while self._ends:  # the variable is not needed any more
            self._ends.pop()()
        if not recording:
            hang_after = 0.0
        prefixed: Any = dist.PrefixStore("watch", dist.distributed_c10d._get_default_store())
        try:
            store = prefixed.clone()
        except (AttributeError, RuntimeError) as error:
            self._state = f"off: the process group's store has no second connection ({error})"
            return
        rank = accelerator.process_index
        folder = run_folder.create(rank)
        limit = accelerator.group_timeout
        factor = self._settings.straggler_factor if recording else 0.0
        watcher = Watcher(
            rank=rank,
            local_rank=accelerator.local_process_index,
            ranks=accelerator.num_processes,
            alone=accelerator.local_process_count == 1,
            store=store,
            folder=folder,
            hang_after=hang_after,
            timeout=None if limit is None else limit.total_seconds(),
            steps=_step_counter(accelerator),
            stragglers=self._stragglers(factor, accelerator.num_processes),
        )
        self._watcher = watcher
        ranks = drift.compared_ranks(accelerator) if self._settings.drift != "off" else []
        if len(ranks) > 1:
            raises = self._settings.drift == "error"
            self._drift = watcher.drift = drift.Drift(accelerator, raises, ranks, watcher.wake)
        restore = terminate.before_abort(lambda: watcher.report_and_wait(ABORTS))
        self._ends += [restore, _leaving(folder, rank)]
        atexit.register(self._end_at_exit)
        # If it is deleted without end_training. At exit, the line above ends the reports.
        weakref.finalize(accelerator, self._end, finish=False).atexit = False
        watcher.start()
        self._state = f"a report is printed after {hang_after:g} s in a collective"
        if not recording:
            self._state = "only on SIGUSR2, because this torch records no collectives"
        elif not hang_after:
            self._state = "a report is only printed on SIGUSR2"

    def _stragglers(self, factor: float, ranks: int) -> Stragglers | None:
        from accelerate_watch.stragglers import Stragglers

        return Stragglers(factor, self._settings.straggler_interval, ranks) if factor else None

    def _hang_after(self, accelerator: AcceleratorView) -> float:
        if self._settings.hang_after is not None:
            return self._settings.hang_after
        limit = accelerator.group_timeout
        return _HANG_AFTER if limit is None else min(_HANG_AFTER, limit.total_seconds() / 2)

    @hookimpl
    def on_prepared(
        self, accelerator: AcceleratorView, given: Sequence[object], prepared: Sequence[object]
    ) -> None:
        """Compare facts of the ranks after some steps of the optimizers.

        Args:
            given, prepared: see the hook `on_prepared`.
        """
        if self._drift is not None:
            self._drift.watch(accelerator.optimizers)

    @hookimpl
    def on_end(self, accelerator: AcceleratorView) -> None:
        """End the thread before the process group ends.

        Raises:
            DriftError: ranks have drifted apart in the last steps, and `drift="error"` is set.
        """
        self._end()
        drift, self._drift = self._drift, None
        if drift is not None and drift.verdict and not drift.raised:
            raise DriftError(drift.verdict)

    def _end(self, finish: bool = True) -> None:
        # A rank that ends because of an exception does not wait for the others.
        failed = getattr(sys, "last_value", None) is not None or sys.exc_info()[0] is not None
        if self._watcher is not None:
            if self._drift is not None and finish and not failed:
                self._drift.capture_last()
            self._watcher.stop(finish and not failed)
            self._watcher = None
        for end in self._ends:
            end()
        self._ends = []
        atexit.unregister(self._end_at_exit)

    def _end_at_exit(self) -> None:
        """End without `end_training`, when it is too late to raise an error."""
        self._end()
        if self._drift is not None and self._drift.verdict and not self._drift.raised:
            sys.stderr.write(f"\naccelerate-watch: {self._drift.verdict}\n")

    @hookimpl
    def explain(self) -> str:
        """Return when a report is printed."""
        if self._drift is None:
            return f"hang reports: {self._state}"
        compared = f"off: {self._drift.failed}" if self._drift.failed else self._settings.drift
        return f"hang reports: {self._state}; ranks that drift apart: {compared}"


def _leaving(folder: Path, rank: int) -> Callable[[], None]:
    from accelerate_watch import run_folder

    return lambda: run_folder.leave(folder, rank)


def _step_counter(accelerator: AcceleratorView) -> Callable[[], int]:
    """Return a function that reads how many steps the optimizers took."""
    reference = weakref.ref(accelerator)

    def steps() -> int:
        there = reference()
        if there is None:
            return 0
        return max((one.steps_taken for one in there.optimizers), default=0)

    return steps
