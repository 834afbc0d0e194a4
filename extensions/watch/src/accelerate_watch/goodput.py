"""Measure what the time of a run is spent on: steps, waiting for data, saving, loading, restarts."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from accelerate_core.plugin import (
    AcceleratorView,
    Claim,
    KwargsHandler,
    PreparedOptimizer,
    Request,
    hookimpl,
    option,
    settings,
)
from accelerate_watch.settings import claim_if_configured

_FILE = "goodput.json"
#: Seconds between two looks at the main thread, and between two writes of the progress.
_SAMPLE = 0.05
_WRITE = 2.0
#: Part of a file's path -> what the main thread does while such a file is on its stack.
_PLACES = {
    "/accelerate_checkpoint/": "saving",
    "/torch/utils/data/": "data",
    "/accelerate_core/data/": "data",
}
_ACTIVITIES = ("steps", "data", "saving", "loading", "starting")
#: Name of a device -> its peak in dense bf16 operations per second, as its maker states it.
_PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
    "MI300X": 1307e12,
    "MI250X": 383e12,
}


@settings(env_prefix="ACCELERATE_GOODPUT_", section="goodput_config")
class GoodputKwargs(KwargsHandler):
    """Measure what the time of a run is spent on, and log it.

    Example:
        accelerator = Accelerator(
            log_with="jsonl", project_dir="runs", kwargs_handlers=[GoodputKwargs(log_every=30)]
        )
    """

    log_every: float = option(
        default=30.0, help="seconds between two entries in the trackers; 0 for none", ge=0
    )
    tokens_per_sample: int = option(default=0, help="also report tokens per second", ge=0)
    peak_flops: float | None = option(
        default=None,
        help="peak operations per second of one device, for MFU; default: known for common GPUs",
        gt=0,
    )


class Goodput:
    """Provides `accelerator.goodput` if `kwargs_handlers` contains a `GoodputKwargs`.

    Args:
        settings: what is reported, and how often.
    """

    name = "goodput"
    api_version = (1, 0)
    Settings = GoodputKwargs

    def __init__(self, settings: GoodputKwargs) -> None:
        self._settings = settings
        self._meter: GoodputMeter | None = None

    @classmethod
    def detect(cls, request: Request) -> Claim | None:
        """Claim runs that pass a `GoodputKwargs`, or have a section `goodput_config`."""
        return claim_if_configured(request, GoodputKwargs, "goodput_config")

    @hookimpl
    def on_start(self, accelerator: AcceleratorView) -> None:
        """Start measuring."""
        directory = str(getattr(accelerator, "project_dir", None) or "")
        progress = None
        # A URL has no place for it. Then a restarted run does not know how many steps were lost.
        if directory and "://" not in directory and accelerator.is_main_process:
            progress = Path(directory) / _FILE
        self._meter = GoodputMeter(self._settings, progress)
        self._meter.start()
        weakref.finalize(accelerator, self._meter.stop)  # if it is deleted without end_training

    @hookimpl
    def on_step_end(self, accelerator: AcceleratorView, optimizer: PreparedOptimizer) -> None:
        """Count the step, and log if it is time."""
        meter = self._meter
        assert meter is not None
        if accelerator.optimizers and optimizer is accelerator.optimizers[0]:
            meter.count_step(accelerator)
        if meter.is_due() and accelerator.is_main_process:
            log: Any = accelerator
            log.log(meter.values(accelerator), step=meter.steps)

    @hookimpl
    def on_save(self, accelerator: AcceleratorView, directory: Path) -> None:
        """Save the totals."""
        assert self._meter is not None
        if accelerator.is_main_process:
            (directory / _FILE).write_text(json.dumps(self._meter.totals()))

    @hookimpl
    def on_load(self, directory: Path) -> None:
        """Continue with the totals of a checkpoint; steps after it are lost."""
        if self._meter is not None and (directory / _FILE).exists():
            self._meter.resume(json.loads((directory / _FILE).read_text()))

    @hookimpl
    def on_end(self) -> None:
        """Stop measuring."""
        if self._meter is not None:
            self._meter.stop()

    @hookimpl
    def state_attributes(self, accelerator: AcceleratorView) -> Mapping[str, Any]:
        """Provide `accelerator.goodput`."""
        return {"goodput": self._meter}


class GoodputMeter(threading.Thread):
    """Looks at the main thread 20 times per second and counts what it is doing.

    Args:
        settings: what to report.
        progress: the file that survives a failure, from which the next attempt learns how many steps
            were lost; None for none.
    """

    def __init__(self, settings: GoodputKwargs, progress: Path | None) -> None:
        super().__init__(name="accelerate-goodput", daemon=True)
        self._settings = settings
        self._progress = progress
        self._main = threading.main_thread().ident or 0
        #: How far the attempt before this one came.
        self._before = _read(progress) if progress is not None else {}
        self._resumed = False
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._begun = time.time()
        self._over = threading.Event()
        self._next_log = time.monotonic() + settings.log_every
        self._last: tuple[float, int] | None = None
        self._flops = 0
        #: Steps that this process took, and steps of earlier attempts up to the checkpoint.
        self.own_steps = 0
        self._base_steps = 0
        self._restarts = 0
        self._restart_seconds = 0.0
        self._lost_steps = 0

    @property
    def steps(self) -> int:
        """Steps of the whole run, without those that were lost."""
        return self._base_steps + self.own_steps

    def stop(self) -> None:
        """Stop measuring."""
        self._over.set()

    def run(self) -> None:
        """Look at the main thread until the run ends."""
        then = time.monotonic()
        written = then
        while not self._over.wait(_SAMPLE):
            now = time.monotonic()
            # The frame is not kept, because it keeps the objects of the script alive.
            self._seconds[self._activity(sys._current_frames().get(self._main))] += now - then
            then = now
            if self._progress is not None and self.own_steps and now - written > _WRITE:
                written = now
                _write(self._progress, self.totals())

    def _activity(self, frame: FrameType | None) -> str:
        activity = "steps" if self.own_steps else "starting"
        while frame is not None:
            if frame.f_code.co_name == "load_state":
                return "loading"
            file = frame.f_code.co_filename.replace(os.sep, "/")
            found = next((what for part, what in _PLACES.items() if part in file), None)
            activity = found or activity
            frame = frame.f_back
        return activity

    # --- over restarts ------------------------------------------------------------------------

    def totals(self) -> dict[str, Any]:
        """Return what a later attempt continues with."""
        return {
            "seconds": dict(self._seconds),
            "steps": self.steps,
            "restarts": self._restarts,
            "restart_seconds": self._restart_seconds,
            "lost_steps": self._lost_steps,
            "time": time.time(),
        }

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Continue with the totals of a checkpoint.

        In a new process, the file that the failed attempt left says how far that one had come.
        """
        self._resumed = True
        reached = self.steps
        if not self.own_steps:
            before = self._before or saved
            reached = max(int(before["steps"]), int(saved["steps"]))
            for name, seconds in before["seconds"].items():
                self._seconds[name] += seconds
            self._restarts = int(before["restarts"]) + 1
            gap = max(0.0, self._begun - float(before["time"]))
            self._restart_seconds = float(before["restart_seconds"]) + gap
            self._lost_steps = int(before["lost_steps"])
        self._lost_steps += reached - int(saved["steps"])
        self._base_steps = int(saved["steps"]) - self.own_steps

    # --- values -------------------------------------------------------------------------------

    @contextmanager
    def count_flops(self) -> Iterator[None]:
        """Count the operations of the block, which must train one micro-batch; MFU is then reported.

        Use it as `with accelerator.goodput.count_flops(): accelerator.backward(loss)`.
        """
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            yield
        self._flops = counter.get_total_flops()

    def count_step(self, accelerator: AcceleratorView) -> None:
        """Count a step. The speed is measured from the end of the first one."""
        if not self.own_steps and not self._resumed and self._before and _is_restarted():
            self.resume({"steps": 0})  # the attempt before this one failed before it saved
        self.own_steps += 1
        if self._last is None:
            self._last = (time.monotonic(), accelerator.gradient_state.backwards)

    def is_due(self) -> bool:
        """Return whether values should be logged now."""
        now = time.monotonic()
        if not self._settings.log_every or now < self._next_log:
            return False
        self._next_log = now + self._settings.log_every
        return True

    def values(self, accelerator: AcceleratorView) -> dict[str, float]:
        """Return what the time was spent on so far, and the speed since the last call if batches came."""
        seconds = {name: float(self._seconds[name]) for name in _ACTIVITIES}
        whole = sum(seconds.values()) + self._restart_seconds
        kept = self.steps / max(1, self.steps + self._lost_steps)
        values: dict[str, float] = {
            "goodput/fraction": seconds["steps"] * kept / whole if whole else 0.0,
            **{f"goodput/{name}_seconds": value for name, value in seconds.items()},
            "goodput/restart_seconds": self._restart_seconds,
            "goodput/restarts": self._restarts,
            "goodput/lost_steps": self._lost_steps,
        }
        now, batches = time.monotonic(), accelerator.gradient_state.backwards
        if self._last is None or batches > self._last[1]:
            if self._last is not None:
                rate = (batches - self._last[1]) / (now - self._last[0])
                values |= self._speed(accelerator, rate)
            self._last = (now, batches)
        return values

    def _speed(self, accelerator: AcceleratorView, batches_per_second: float) -> dict[str, float]:
        speed = {}
        sizes = (getattr(loader, "total_batch_size", None) for loader in accelerator.loaders)
        size = next(filter(None, sizes), None)
        if size:
            speed["goodput/samples_per_second"] = batches_per_second * size
            if self._settings.tokens_per_sample:
                tokens = batches_per_second * size * self._settings.tokens_per_sample
                speed["goodput/tokens_per_second"] = tokens
        peak = self._settings.peak_flops or _known_peak(accelerator)
        if self._flops and peak:
            speed["goodput/mfu"] = self._flops * batches_per_second / peak
        return speed


def _known_peak(accelerator: AcceleratorView) -> float:
    import torch

    if accelerator.device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(accelerator.device)
    return next((peak for known, peak in _PEAK_FLOPS.items() if known in name), 0.0)


def _is_restarted() -> bool:
    """Return whether a launcher has restarted this process, so that its run is not a new one."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found


def _write(file: Path, values: Mapping[str, Any]) -> None:
    draft = file.with_suffix(".draft")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(values))
        draft.replace(file)
    except OSError:  # the folder has gone, or the disk is full: training is more important
        return
