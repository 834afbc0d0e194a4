"""A value that cannot be logged does not affect other values; forks, failures and second runs."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pool
import pytest

from accelerate_core.errors import ConfigurationError, TrackerError
from accelerate_tracking import GeneralTracker, TrackerHub, each, tracker_threads
from accelerate_tracking.recorded_runs import read_run


class Picky(GeneralTracker):
    """Refuses the value 13 and the name `bad`."""

    name = "picky"
    requires_logging_directory = False
    packages = ()

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []
        self.slow_end = 0.0

    @property
    def tracker(self) -> Any:
        return self.rows

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        def write(key: str, value: Any) -> None:
            if value == 13:
                raise ValueError("thirteen")
            self.rows.append((step, key, value))

        each(values, write)

    def log_text(self, name: str, text: str, step: int | None = None) -> None:
        if name == "bad":
            raise KeyError(name)
        self.rows.append((step, name, text))

    def log_histogram(self, name: str, values: Any, step: int | None = None) -> None:
        assert np.isfinite(values).all()
        self.rows.append((step, name, values.tolist()))

    def log_artifact(self, path: str, name: str) -> None:
        self.rows.append((None, name, Path(path).read_text()))

    def finish(self) -> None:
        time.sleep(self.slow_end)


def make(tmp_path: Path, *more: Any) -> tuple[TrackerHub, Picky]:
    picky = Picky()
    hub = TrackerHub([picky, "jsonl", *more], tmp_path)
    return hub, picky


def lines(tmp_path: Path, kind: str) -> list[dict[str, Any]]:
    found = []
    for file in sorted(tmp_path.glob("*/*/run.jsonl")):
        found += [json.loads(line) for line in file.read_text().splitlines()]
    return [row for row in found if row["kind"] == kind]


def test_refused_value_does_not_lose_other_values(tmp_path: Path) -> None:
    hub, picky = make(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hub.init_trackers("p")
        for step in range(8):
            hub.log({"a": step, "odd": 13, "b": step}, step=step)
        for step in range(3):
            hub.log_text(name="bad", text="x", step=step)
        hub.log_text(name="good", text="y", step=3)
        hub.finish()
    assert [row for row in picky.rows if row[1] == "b"] == [(i, "b", i) for i in range(8)]
    assert picky.rows[-1] == (3, "good", "y")
    texts = [str(one.message) for one in caught]
    assert len(texts) == 2, texts  # once per key
    assert "'odd' (ValueError: thirteen)" in texts[0]
    assert "log_text of 'bad' and skips this entry" in texts[1]


def test_histograms_get_finite_values_and_empty_ones_are_refused(tmp_path: Path) -> None:
    hub, picky = make(tmp_path)
    hub.init_trackers("p")
    hub.log_histogram(name="h", values=np.array([np.nan, np.inf]))
    hub.log_histogram(name="h", values=np.array([]))
    hub.log_histogram(name="h", values=np.array([1.0, np.nan, 2.0]))
    with pytest.warns(RuntimeWarning, match="no finite value"):
        hub.flush_trackers()
    assert picky.rows == [(None, "h", [1.0, 2.0])]
    assert [row["not_finite"] for row in lines(tmp_path, "histogram")] == [2, 0, 1]
    hub.finish()


def test_artifact_is_copied_at_the_call(tmp_path: Path) -> None:
    hub, picky = make(tmp_path / "logs")
    hub.init_trackers("p")
    file = tmp_path / "model.bin"
    file.write_text("one")
    hub.log_artifact(path=file, name="../first")
    file.write_text("two")
    hub.log_artifact(path=file)
    file.unlink()
    hub.finish()
    assert picky.rows == [(None, "../first", "one"), (None, "model.bin", "two")]
    files = {path.name: path.read_text() for path in tmp_path.rglob("artifacts/*")}
    assert files == {"first": "one", "model.bin": "two"}
    assert not list((tmp_path / "logs").glob(".artifacts-*"))


def test_tables_keep_all_columns_and_warn_about_invalid_cells(tmp_path: Path) -> None:
    hub, _ = make(tmp_path)
    hub.init_trackers("p")
    with pytest.warns(UserWarning, match=r"'t\[a \(2\)\]' is a dict, but a cell must be a single"):
        hub.log_table(table_name="t", columns=["a", "a"], data=[[1, {"score": 0.5}], [2, 3]])
    hub.finish()
    (table,) = lines(tmp_path, "table")
    assert (table["columns"], table["data"]) == (["a", "a (2)"], [[1, None], [2, 3]])


def test_invalid_figure_or_empty_image_is_an_error(tmp_path: Path) -> None:
    hub, _ = make(tmp_path)
    hub.init_trackers("p")
    with pytest.raises(ConfigurationError, match="needs a matplotlib figure, not NoneType"):
        hub.log_figure(name="f", figure=None)
    with pytest.raises(ConfigurationError, match="is empty"):
        hub.log_images(values={"x": np.zeros((0, 4, 4, 3))})
    hub.finish()


def test_run_files_are_strict_json(tmp_path: Path) -> None:
    hub, _ = make(tmp_path)
    hub.init_trackers("p")
    hub.log({"loss": float("nan"), "big": 10**400, "name": os.fsdecode(b"\xff")}, step=1234567)
    hub.finish()
    (row,) = lines(tmp_path, "log")
    assert row["values"]["loss"] == "NaN"
    assert row["values"]["name"] == "\\udcff"
    run = read_run(next(tmp_path.glob("*/*")))
    assert np.isnan(run.curves["loss"][0][1])
    assert run.curves["big"] == [(1234567, float("inf"))]
    from click.testing import CliRunner

    from accelerate_tracking.commands.runs import command

    shown = CliRunner().invoke(command, ["show", str(tmp_path), "--json", "--key", "loss"])

    def refuse(text: str) -> None:
        raise AssertionError(text)

    assert json.loads(shown.output, parse_constant=refuse)[0]["summary"]["loss"]["step"] == 1234567


def test_run_after_a_resumed_run_gets_a_new_name(tmp_path: Path) -> None:
    hub, _ = make(tmp_path)
    hub.init_trackers("p")
    hub.log({"a": 1}, step=1)
    state = hub.state_dict()
    hub.finish()
    hub, _ = make(tmp_path)
    hub.load_state_dict(state)
    hub.init_trackers("p")
    hub.finish()
    hub.init_trackers("q")
    hub.finish()
    assert [row["resumed"] for row in lines(tmp_path, "start")] == [False, True, False]


def test_tracker_that_hangs_in_finish_is_given_up_and_the_others_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, picky = make(tmp_path)
    picky.slow_end = 3600
    monkeypatch.setattr(tracker_threads, "PATIENCE", 0.5)
    hub.init_trackers("p")
    hub.log_artifact(path=__file__)
    with pytest.warns(RuntimeWarning, match=r"'picky'.* raised in finish.*did not finish within"):
        hub.finish()
    assert lines(tmp_path, "end")[0]["status"] == "finished"
    assert list(tmp_path.glob(".artifacts-*/*/*.py"))  # it may still be reading the copy


@pytest.mark.parametrize("declared", [None, True, False])
def test_tracker_with_a_sqlite_connection_is_called_in_its_own_thread(
    tmp_path: Path, declared: bool | None, recwarn: pytest.WarningsRecorder
) -> None:
    class Sq(GeneralTracker):
        name = "sq"
        requires_logging_directory = False

        def __init__(self) -> None:
            super().__init__()
            self.base = sqlite3.connect(tmp_path / "x.db", check_same_thread=declared is not False)
            self.base.execute("create table t (step, value)")

        @property
        def tracker(self) -> Any:
            return self.base

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            here = threading.current_thread() is threading.main_thread()
            self.base.execute("insert into t values (?, ?)", (step, here))

        def finish(self) -> None:
            self.base.commit()

    if declared is not None:
        Sq.same_thread = declared
    tracker = Sq()
    hub = TrackerHub([tracker])
    hub.init_trackers("p")
    hub.log({"a": 1.5}, step=3)
    hub.finish()
    assert tracker.base.execute("select * from t").fetchall() == [(3, declared is not False)]
    warned = [str(one.message) for one in recwarn if "same_thread = True" in str(one.message)]
    assert bool(warned) is (declared is None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forked_child_does_not_touch_the_run(tmp_path: Path) -> None:
    hub, _ = make(tmp_path)
    hub.init_trackers("p")
    hub.log({"a": 1}, step=1)
    child = os.fork()
    if child == 0:
        try:
            hub.log({"child": 1}, step=2)
        except TrackerError:
            hub.finish()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert not lines(tmp_path, "end")
    hub.log({"a": 2}, step=2)
    hub.finish()
    assert [row["values"] for row in lines(tmp_path, "log")] == [{"a": 1}, {"a": 2}]


HEAD = """
import os, sys, signal, time
from accelerate_core import Accelerator
from accelerate_tracking import GeneralTracker, register_tracker_class
accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=".")
accelerator.init_trackers("one")
accelerator.log({"a": 1}, step=1)
"""
ENDINGS = {
    "sys.exit(1)": "failed",
    "sys.exit('bad data')": "failed",
    "sys.exit(0)": "finished",
    "with accelerator: sys.exit(0)": "finished",
    "import threading; t = threading.Thread(target=sys.exit, args=(1,)); t.start(); t.join()": "finished",
    "try:\n    1 / 0\nfinally:\n    accelerator.end_training()": "failed",
    "try:\n    1 / 0\nexcept ZeroDivisionError:\n    pass\naccelerator.end_training()": "finished",
}


def test_status_matches_how_the_script_ended(tmp_path: Path) -> None:
    folders = {}
    for number, ending in enumerate(ENDINGS):
        folder = folders[ending] = tmp_path / str(number)
        folder.mkdir()
        pool.run(["-c", HEAD + ending], os.environ, 120, cwd=folder)
    found = {ending: lines(folder, "end")[0]["status"] for ending, folder in folders.items()}
    assert found == ENDINGS
    second = """
accelerator.end_training()
accelerator.init_trackers("two")
accelerator.log({"a": 2}, step=1)
accelerator.end_training()
try:
    accelerator.log({"a": 3}, step=2)
except Exception as error:
    print(type(error).__name__)
print(open(next(__import__("pathlib").Path("two").glob("*/run.jsonl"))).read())
"""
    done = pool.run(["-c", HEAD + second], os.environ, 120, cwd=tmp_path)
    first, *rows = done.stdout.split("\n")
    assert first == "TrackerError", done.stderr
    assert [json.loads(row)["kind"] for row in rows if row] == ["start", "log", "end"]


@pytest.mark.parametrize(
    "run", ["/tmp/planted", "../planted", "..", ".", "a/b", "a\\b", "C:x", "a\nb", "", "x" * 999, 3, None]
)  # fmt: skip
def test_checkpoint_does_not_choose_where_a_tracker_writes(tmp_path: Path, run: Any) -> None:
    hub, _ = make(tmp_path / "logs")
    with pytest.warns(UserWarning, match="the name of a run cannot contain slashes"):
        hub.load_state_dict({"runs": {"jsonl": run}})
    hub.init_trackers("p")
    hub.log({"a": 1}, step=1)
    hub.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]
    assert [row["resumed"] for row in lines(tmp_path / "logs", "start")] == [False]
