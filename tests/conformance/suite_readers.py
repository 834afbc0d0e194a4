"""Read back for the suite what two trackers wrote: key -> [step, value] in order."""

from __future__ import annotations

import json
from pathlib import Path


def jsonl(directory: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(Path(directory).rglob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            for key, value in row.get("values", {}).items() if "step" in row else ():
                found.setdefault(key, []).append((row["step"], value))
    return found


def tensorboard(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = {path.parent for path in Path(directory).rglob("events.out.*")}
    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
