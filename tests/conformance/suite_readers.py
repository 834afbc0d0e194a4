"""Readers of what trackers wrote, for the suite: key -> [step, value] in order, and the config."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import readers  # of tests/trackers


def jsonl(directory: Path) -> dict[str, list[tuple[int | None, Any]]]:
    found: dict[str, list[tuple[int | None, Any]]] = {}
    for row in _rows(directory, "log"):
        for key, value in row["values"].items():
            found.setdefault(key, []).append((row["step"], value))
    return found


def jsonl_config(directory: Path) -> dict[str, Any]:
    (row,) = _rows(directory, "config")
    values: dict[str, Any] = row["values"]
    return values


def _rows(directory: Path, kind: str) -> Iterator[dict[str, Any]]:
    for path in sorted(Path(directory).rglob("run.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["kind"] == kind:
                yield row


def tensorboard(directory: Path) -> dict[str, list[tuple[int, Any]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    (folder,) = {path.parent for path in Path(directory).rglob("events.out.*")}
    events = EventAccumulator(str(folder)).Reload()
    found: dict[str, list[tuple[int, Any]]] = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    for tag in events.Tags()["tensors"]:  # a text is a tensor of one string, under a longer name
        texts = [(one.step, make_ndarray(one.tensor_proto)) for one in events.Tensors(tag)]
        name = tag.removesuffix("/text_summary")
        found[name] = [(step, array.item().decode()) for step, array in texts if array.size == 1]
    return found


def tensorboard_config(directory: Path) -> dict[str, Any]:
    (path,) = Path(directory).rglob("hparams.json")
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config


def wandb(directory: Path) -> Any:
    return _joined(map(readers.wandb_run, sorted(directory.glob("wandb/offline-run-*"))))


def comet_ml(directory: Path) -> Any:
    return _joined(map(readers.comet_archive, sorted(directory.glob("comet/*.zip"))))


def _joined(runs: Iterator[dict[str, Any]]) -> dict[str, list[Any]]:
    """Join the files of a run, which gets a new one each time that it is resumed."""
    found: dict[str, list[Any]] = {}
    for run in runs:
        for key, pairs in run["values"].items():
            found.setdefault(key, []).extend(pairs)
    return found
