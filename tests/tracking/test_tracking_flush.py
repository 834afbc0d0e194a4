"""When a tracker's library is flushed, who is waited for and how long, and who promises nothing."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_core import Accelerator
from accelerate_core.accelerator import saving
from accelerate_tracking import GeneralTracker, TrackerHub, tracker_threads
from accelerate_tracking.runs import read_run


class Buffered(GeneralTracker):
    """Has what it was given on disk only after `flush`."""

    name = "buffered"
    requires_logging_directory = False
    promises = True

    def __init__(self, project_name: str = "") -> None:
        super().__init__()
        self.buffer: list[Any] = []
        self.disk: list[Any] = []
        self.flushes = 0
        self.hold = threading.Event()
        self.hold.set()

    @property
    def tracker(self) -> Any:
        return self.disk

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.hold.wait(30)
        self.buffer.append(step)

    def flush(self) -> bool:
        self.flushes += 1
        self.disk += self.buffer
        self.buffer = []
        return self.promises


class Vague(Buffered):
    name = "vague"
    promises = False


@contextmanager
def said() -> Iterator[list[str]]:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught]


def wait_for(condition: Any) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_what_was_logged_is_flushed_soon_without_being_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracker_threads, "FLUSH_EVERY", 0.2)
    tracker = Buffered()
    hub = TrackerHub(tracker)
    hub.init_trackers("p")
    hub.log({"a": 1}, step=0)
    wait_for(lambda: tracker.disk == [0])
    for step in range(1, 200):  # and while values keep coming
        hub.log({"a": 1}, step=step)
        time.sleep(0.005)
    assert len(tracker.disk) > 1
    wait_for(lambda: len(tracker.disk) == 200)
    flushes = tracker.flushes
    time.sleep(0.6)
    assert tracker.flushes == flushes  # nothing is flushed where nothing came
    hub.finish()


def test_a_flush_waits_as_long_as_it_was_told_and_names_who_is_late() -> None:
    slow, quick = Buffered(), Vague()
    slow.hold.clear()
    hub = TrackerHub([slow, quick])
    hub.init_trackers("p")
    hub.log({"a": 1}, step=0)
    begun = time.monotonic()
    with said() as texts:
        assert hub.flush_trackers(0.5) == ["buffered"]
    assert 0.4 < time.monotonic() - begun < 10
    assert [text for text in texts if "safe from a kill" in text]
    assert quick.disk == [0]
    slow.hold.set()
    assert hub.flush_trackers() == []
    assert slow.disk == [0]
    hub.finish()


def test_who_promises_nothing_is_named_once_unless_the_built_in_one_runs(tmp_path: Path) -> None:
    hub = TrackerHub([Buffered(), Vague()])
    hub.init_trackers("p")
    with said() as texts:
        for step in range(3):
            hub.log({"a": 1}, step=step)
            assert hub.flush_trackers() == []
    assert texts == [
        "What is logged is safe from a kill only at the end of the run with 'vague'. "
        "To have every value after one, add 'jsonl' to log_with."
    ]
    hub.finish()
    hub = TrackerHub([Vague(), "jsonl"], tmp_path)
    hub.init_trackers("p")
    with said() as texts:
        hub.log({"a": 1}, step=0)
        hub.flush_trackers()
    assert texts == []
    hub.finish()


def test_a_tracker_that_cannot_flush_is_switched_off() -> None:
    class Full(Buffered):
        name = "full"

        def flush(self) -> bool:
            raise OSError("no space left")

    hub = TrackerHub(Full())
    hub.init_trackers("p")
    hub.log({"a": 1}, step=0)
    with pytest.warns(RuntimeWarning, match=r"'full' raised in flush and is switched off"):
        hub.flush_trackers()
    hub.finish()


def test_a_save_brings_values_to_the_trackers_and_waits_a_while_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "SAVE_WAIT", 0.5)
    tracker = Buffered()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.init_trackers("p")
    accelerator.log({"a": 1}, step=0)
    accelerator.save_state(tmp_path / "one")
    assert tracker.disk == [0]
    tracker.hold.clear()
    accelerator.log({"a": 1}, step=1)
    with said() as texts:
        accelerator.save_state(tmp_path / "two")
        accelerator.save_state(tmp_path / "three")
        assert accelerator.flush_trackers(0.1) == ["buffered"]
    late = [text for text in texts if "'buffered' had not taken everything" in text]
    assert len(late) == 1
    assert tracker.disk == [0]
    tracker.hold.set()
    accelerator.end_training()
    assert tracker.disk == [0, 1]


def test_a_run_that_was_there_before_is_not_deleted_for_one_that_is_resumed(
    tmp_path: Path,
) -> None:
    kwargs = {"jsonl": {"run_name": "mine"}}
    hub = TrackerHub("jsonl", tmp_path)
    hub.init_trackers("p", None, kwargs)
    hub.log({"a": 1}, step=0)
    state = hub.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hub.load_state_dict(state)  # back to a checkpoint of the run that goes on
    hub.finish()
    hub = TrackerHub("jsonl", tmp_path)
    hub.init_trackers("p", None, {"jsonl": {"run_name": "other"}})
    hub.load_state_dict(state)
    hub.load_state_dict(state)
    hub.log({"a": 2}, step=1)
    hub.finish()
    hub = TrackerHub("jsonl", tmp_path)
    hub.init_trackers("p", None, kwargs)  # a name of one's own: the folder of the first start
    hub.load_state_dict({"runs": {"jsonl": "third"}})
    hub.log({"a": 3}, step=2)
    hub.finish()
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == ["mine", "third"]
    assert read_run(tmp_path / "p" / "mine").curves["a"] == [(0, 1.0), (1, 2.0)]
    assert hub.resumed_runs == {"jsonl": "third"}


def test_exits_are_watched_only_while_a_run_is_open() -> None:
    before = (sys.excepthook, sys.exit)
    hub = TrackerHub(Buffered())
    hub.init_trackers("p")
    assert sys.excepthook is not before[0]
    assert sys.exit is not before[1]
    hub.finish()
    assert (sys.excepthook, sys.exit) == before


def test_off_a_terminal_what_is_left_is_told_now_and_then(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Buffered):
        name = "slow"

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            time.sleep(0.4)

    monkeypatch.setattr(tracker_threads, "SAY_EVERY", 1.0)
    monkeypatch.setattr(tracker_threads, "REST", 0.0)
    hub = TrackerHub(Slow())
    hub.init_trackers("p")
    for step in range(9):
        hub.log({"x": step}, step=step)
    hub.finish()
    said = capfd.readouterr().err
    lines = [line for line in said.splitlines() if "Trackers write what is left: slow" in line]
    assert 1 <= len(lines) <= 4
    assert "\r" not in said
