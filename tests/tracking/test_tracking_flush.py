"""When trackers are flushed, how long a flush waits, and warnings about values that may be lost."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support import collect_warnings

from accelerate_core import Accelerator
from accelerate_core.accelerator import saving
from accelerate_tracking import GeneralTracker, TrackerHub, tracker_threads
from accelerate_tracking.recorded_runs import read_run


class Buffered(GeneralTracker):
    """Writes its values to `disk` only in `flush`."""

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


def wait_for(condition: Any) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_values_are_flushed_soon_without_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracker_threads, "FLUSH_EVERY", 0.2)
    tracker = Buffered()
    hub = TrackerHub(tracker)
    hub.init_trackers("p")
    hub.log({"a": 1}, step=0)
    wait_for(lambda: tracker.disk == [0])
    for step in range(1, 200):  # it is also flushed while more values arrive
        hub.log({"a": 1}, step=step)
        time.sleep(0.005)
    assert len(tracker.disk) > 1
    wait_for(lambda: len(tracker.disk) == 200)
    flushes = tracker.flushes
    time.sleep(0.6)
    assert tracker.flushes == flushes  # no flush without new values
    hub.finish()


def test_flush_waits_for_the_timeout_and_returns_late_trackers() -> None:
    slow, quick = Buffered(), Vague()
    slow.hold.clear()
    hub = TrackerHub([slow, quick])
    hub.init_trackers("p")
    hub.log({"a": 1}, step=0)
    begun = time.monotonic()
    with collect_warnings() as texts:
        assert hub.flush_trackers(0.5) == ["buffered"]
    assert 0.4 < time.monotonic() - begun < 10
    assert [text for text in texts if "may lose values" in text]
    assert quick.disk == [0]
    slow.hold.set()
    assert hub.flush_trackers() == []
    assert slow.disk == [0]
    hub.finish()


def test_warns_once_about_trackers_that_may_lose_values_unless_jsonl_runs(tmp_path: Path) -> None:
    hub = TrackerHub([Buffered(), Vague()])
    hub.init_trackers("p")
    with collect_warnings() as texts:
        for step in range(3):
            hub.log({"a": 1}, step=step)
            assert hub.flush_trackers() == []
    assert texts == [
        "UserWarning: If this process is killed, 'vague' may lose values: its library only writes everything "
        "at the end of the run. To keep every value, add 'jsonl' to log_with."
    ]
    hub.finish()
    hub = TrackerHub([Vague(), "jsonl"], tmp_path)
    hub.init_trackers("p")
    with collect_warnings() as texts:
        hub.log({"a": 1}, step=0)
        hub.flush_trackers()
    assert texts == []
    hub.finish()


def test_tracker_that_cannot_flush_is_turned_off() -> None:
    class Full(Buffered):
        name = "full"

        def flush(self) -> bool:
            raise OSError("no space left")

    hub = TrackerHub(Full())
    hub.init_trackers("p")
    hub.log({"a": 1}, step=0)
    with pytest.warns(RuntimeWarning, match=r"'full' raised in flush and was turned off"):
        hub.flush_trackers()
    hub.finish()


def test_save_flushes_trackers_for_a_limited_time(
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
    with collect_warnings() as texts:
        accelerator.save_state(tmp_path / "two")
        accelerator.save_state(tmp_path / "three")
        assert accelerator.flush_trackers(0.1) == ["buffered"]
    late = [text for text in texts if "'buffered' had not received all values" in text]
    assert len(late) == 1
    assert tracker.disk == [0]
    tracker.hold.set()
    accelerator.end_training()
    assert tracker.disk == [0, 1]


def test_resuming_does_not_delete_an_earlier_run_of_the_same_name(
    tmp_path: Path,
) -> None:
    kwargs = {"jsonl": {"run_name": "mine"}}
    hub = TrackerHub("jsonl", tmp_path)
    hub.init_trackers("p", None, kwargs)
    hub.log({"a": 1}, step=0)
    state = hub.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hub.load_state_dict(state)  # loads a checkpoint of the run that is open
    hub.finish()
    hub = TrackerHub("jsonl", tmp_path)
    hub.init_trackers("p", None, {"jsonl": {"run_name": "other"}})
    hub.load_state_dict(state)
    hub.load_state_dict(state)
    hub.log({"a": 2}, step=1)
    hub.finish()
    hub = TrackerHub("jsonl", tmp_path)
    hub.init_trackers("p", None, kwargs)  # an explicit name, so the folder of the first run
    hub.load_state_dict({"runs": {"jsonl": "third"}})
    hub.log({"a": 3}, step=2)
    hub.finish()
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == ["mine", "third"]
    assert read_run(tmp_path / "p" / "mine").curves["a"] == [(0, 1.0), (1, 2.0)]
    assert hub.resumed_runs == {"jsonl": "third"}


def test_exit_hooks_are_installed_only_while_a_run_is_open() -> None:
    before = (sys.excepthook, sys.exit)
    hub = TrackerHub(Buffered())
    hub.init_trackers("p")
    assert sys.excepthook is not before[0]
    assert sys.exit is not before[1]
    hub.finish()
    assert (sys.excepthook, sys.exit) == before


def test_progress_lines_are_rare_when_stderr_is_not_a_terminal(
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
    output = capfd.readouterr().err
    lines = [line for line in output.splitlines() if "Waiting for trackers: slow" in line]
    assert 1 <= len(lines) <= 4
    assert "\r" not in output
