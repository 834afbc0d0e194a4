"""`accelerate-core runs show` prints last values and curves, and draws them as a PNG."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from accelerate_launch.cli import cli
from accelerate_tracking import TrackerHub
from accelerate_tracking.recorded_runs import read_run, sparkline


def show(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["runs", "show", *map(str, arguments)])


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    hub = TrackerHub(["jsonl"], tmp_path)
    hub.init_trackers("digits", {"lr": 0.1, "layers": [8, 8]}, {"jsonl": {"run_name": "first"}})
    for step in range(50):
        hub.log({"loss": 1 / (step + 1), "train": {"accuracy": step / 50}}, step=step)
    hub.log({"loss": math.nan, "note": "diverged"}, step=50)
    hub.finish()
    hub.init_trackers("digits", None, {"jsonl": {"run_name": "second"}})
    hub.log({"loss": 3.0})
    hub.log({"loss": 2.0})
    hub.finish(failed=True)
    return tmp_path


def test_show_prints_last_values_status_and_curves(logs: Path) -> None:
    result = show(logs, "--config")
    assert result.exit_code == 0, result.output
    assert "finished" in result.output
    assert "failed" in result.output
    assert "layers = [8, 8]" in result.output
    (row,) = [line for line in result.output.splitlines() if "train/accuracy" in line]
    assert row.split()[1:6] == ["0.98", "49", "0", "0.98", "50"]
    assert "▁" in row
    assert "█" in row


def test_json_output_has_every_point_of_the_selected_keys(logs: Path) -> None:
    runs = json.loads(show(logs, "--json", "--key", "lo*").stdout)
    assert [run["status"] for run in runs] == ["finished", "failed"]
    assert [list(run["curves"]) for run in runs] == [["loss"], ["loss"]]
    assert runs[1]["curves"]["loss"] == [[0, 3.0], [1, 2.0]]
    assert runs[0]["summary"]["loss"]["count"] == 51
    assert runs[0]["summary"]["loss"]["max"] == 1.0
    assert runs[0]["texts"] == {"note": "diverged"}


def test_png_option_draws_the_curves(logs: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "curves.png"
    result = show(logs, "--png", target)
    assert result.exit_code == 0, result.output
    assert target.read_bytes().startswith(b"\x89PNG")


def test_unknown_key_and_empty_directory_are_errors(logs: Path, tmp_path: Path) -> None:
    result = show(logs, "--key", "los")
    assert result.exit_code == 2
    assert "Did you mean 'loss'?" in result.output
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "There is no run in" in show(empty).output


def test_incomplete_line_is_skipped(logs: Path) -> None:
    path = logs / "digits" / "second"
    file = path / "run.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:-1], lines[-1][:20]]))
    run = read_run(path)
    assert run.status == "running"
    assert run.curves["loss"] == [(0, 3.0), (1, 2.0)]


def test_sparkline_follows_the_curve() -> None:
    assert sparkline([(i, float(i)) for i in range(8)], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([(0, math.nan), (1, 1.0)], 2) == "·▁"
    assert sparkline([(0, 2.0)] * 3) == "▁▁▁"
    assert sparkline([(0, 0.1)] * 100, 4) == "▁▁▁▁"
