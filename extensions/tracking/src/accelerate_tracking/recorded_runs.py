"""Read the runs of the built-in tracker: their status, config and curves."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate_core.plugin import TrackerError
from accelerate_tracking.normalise import as_float

RUN_FILE = "run.jsonl"

_BARS = "▁▂▃▄▅▆▇█"

#: Strings that replace numbers which JSON does not have.
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def strict(value: Any) -> Any:
    """Return a copy for strict JSON, with NaN and infinities replaced by strings."""
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return "NaN"
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    return [strict(item) for item in value] if isinstance(value, (list, tuple)) else value


@dataclass
class RecordedRun:
    """One run, as read from its file.

    `status` is running, finished or failed. A run that was killed also counts as running. `curves`
    maps each key to its (step, value) pairs in the order of logging. A value logged without a step
    gets the step after the previous one.
    """

    path: Path
    project: str = ""
    status: str = "running"
    started: float | None = None
    ended: float | None = None
    config: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, dict[str, int | float]]:
        """Return for each key the last value and its step, the minimum, maximum and count."""
        found = {}
        for key, points in self.curves.items():
            step, last = points[-1]
            finite = [value for _, value in points if math.isfinite(value)]
            low = min(finite, default=math.nan)
            high = max(finite, default=math.nan)
            found[key] = {"last": last, "step": step, "min": low, "max": high, "count": len(points)}
        return found


def find_runs(directory: Path) -> list[Path]:
    """Return the directory itself if it is a run, else all runs below it, oldest first.

    Raises:
        TrackerError: there are no runs.
    """
    if (directory / RUN_FILE).is_file():
        return [directory]
    found = sorted((path.parent for path in directory.rglob(RUN_FILE)), key=lambda p: p.name)
    if not found:
        raise TrackerError(
            f"There is no run in {directory}. Pass a directory that log_with='jsonl' wrote, or one "
            f"of its parents. A run has a file {RUN_FILE}."
        )
    return found


def read_run(path: Path) -> RecordedRun:
    """Read one run. Lines that are incomplete or have another format are skipped."""
    run = RecordedRun(path)
    with (path / RUN_FILE).open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                _take(run, json.loads(line))
    return run


def _take(run: RecordedRun, entry: dict[str, Any]) -> None:
    kind = entry["kind"]
    run.ended = float(entry["time"])
    if kind == "start":
        run.project = entry["project"]
        run.status = "running"
        run.started = run.started or float(entry["time"])
    elif kind == "config":
        run.config.update(entry["values"])
    elif kind == "log":
        for key, value in entry["values"].items():
            if isinstance(value, str):
                value = _SPECIAL.get(value, value)
            if isinstance(value, (bool, int, float)):
                points = run.curves.setdefault(key, [])
                step = entry["step"]
                after = points[-1][0] + 1 if points else 0
                points.append((after if step is None else int(step), as_float(value)))
            else:
                run.texts[key] = str(value)
    elif kind == "text":
        run.texts[entry["name"]] = entry["text"]
    elif kind == "end":
        run.status = entry["status"]
    if "file" in entry:
        run.files.append(entry["file"])


def sparkline(points: list[tuple[int, float]], width: int = 40) -> str:
    """Draw a curve of `width` characters. Each is a mean, or a dot if no value is finite."""
    if not points:
        return ""
    width = min(width, len(points))
    means: list[float | None] = []
    for piece in range(width):
        some = points[piece * len(points) // width : (piece + 1) * len(points) // width]
        finite = [value for _, value in some if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else None)
    known = [mean for mean in means if mean is not None]
    low = min(known, default=0.0)
    high = max(known, default=0.0)
    # Rounding can make means of equal values differ in the last digits.
    span = math.inf if math.isclose(low, high, rel_tol=1e-12) else high - low
    top = len(_BARS) - 1
    return "".join("·" if m is None else _BARS[round((m - low) / span * top)] for m in means)
