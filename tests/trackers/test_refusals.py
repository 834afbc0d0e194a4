"""Names, numbers and call orders for which a library would lose a value or a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accelerate_core.errors import ConfigurationError
from accelerate_tracking import TrackerHub, choice

sys.path.insert(0, str(Path(__file__).parent))
import probe

pytestmark = pytest.mark.filterwarnings("ignore")


def make(name: str, tmp_path: Path, **kwargs: Any) -> TrackerHub:
    tracker = choice.tracker_class(name)("probe", **kwargs)
    return TrackerHub([tracker], tmp_path / "logs")


def test_mlflow_keeps_similar_names_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    hub, beside = make("mlflow", tmp_path), make("mlflow", tmp_path)
    hub.init_trackers("probe", {"p": {"f(1)": 1, "f[1]": 2}})
    beside.init_trackers("probe")
    hub.log({"f1 (a)": 1.0, "f1 [a]": 2.0, "": 3.0, "a//b": 4.0, "k" * 300: 5.0}, step=5)
    hub.log_text(name="sample v1.5", text="one", step=1)
    hub.log_text(name="sample v1.5", text="two", step=2)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.bin").write_text(folder)
        hub.log_artifact(path=tmp_path / folder / "model.bin", name=f"epoch {folder}")
    beside.log({"other": 1.0}, step=0)
    hub.flush_trackers()
    run_id = hub.get_tracker("mlflow").run_id
    beside.finish()
    hub.finish()
    client = mlflow.MlflowClient()
    found = client.get_run(run_id).data
    assert sorted(found.metrics.values()) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert sorted(found.params.values()) == ["1", "2"]
    names = {item.path for item in client.list_artifacts(run_id)}
    assert names >= {"sample v1.5_1.txt", "sample v1.5_2.txt", "epoch a", "epoch b"}
    assert client.get_run(run_id).info.status == "FINISHED"


def test_dvclive_keeps_all_names_and_a_run_that_is_resumed_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("dvclive")
    monkeypatch.chdir(tmp_path)
    options = {"save_dvc_exp": False, "dvcyaml": None}
    hub = make("dvclive", tmp_path, **options)
    hub.init_trackers("probe")
    hub.log({"loss": 1.0, "loss/train": 2.0, "x" * 300: 3.0}, step=0)
    state = hub.state_dict()
    hub.finish()
    hub = make("dvclive", tmp_path, **options)
    hub.init_trackers("probe")
    hub.load_state_dict(state)
    hub.log({"loss": 4.0}, step=1)
    hub.finish()
    metrics = tmp_path / "dvclive" / "plots" / "metrics"
    assert (metrics / "loss.tsv").read_text().split("\n")[1:3] == ["0\t1.0", "1\t4.0"]
    assert (metrics / "loss_train_.tsv").read_text().split("\n")[1] == "0\t2.0"
    assert len(list(metrics.glob("xxx*.tsv"))) == 1


def test_tensorboard_counts_missing_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    hub = make("tensorboard", tmp_path, logging_dir=tmp_path)
    hub.init_trackers("probe")
    for value in range(3):
        hub.log({"loss": float(value)})
    hub.finish()
    events = EventAccumulator(str(tmp_path / "probe"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_boolean_environment_variables_of_libraries_are_parsed_like_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clearml, mlflow = choice.tracker_class("clearml"), choice.tracker_class("mlflow")
    for word in ("1", "Yes", "on"):
        monkeypatch.setenv("MLFLOW_NESTED_RUN", word)
        assert mlflow("probe").nested_run is True
        assert clearml.unusable({"CLEARML_OFFLINE_MODE": word}) is None
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "off")
    assert mlflow("probe", nested_run=True).nested_run is False
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "perhaps")
    with pytest.raises(ConfigurationError, match="MLFLOW_NESTED_RUN='perhaps' is not a boolean"):
        mlflow("probe")


CLEARML = """
from accelerate_clearml import ClearMLTracker
from accelerate_tracking import TrackerHub, choice
tracker = ClearMLTracker("probe", auto_resource_monitoring=False, auto_connect_streams=False)
hub = TrackerHub([tracker], "logs")
hub.init_trackers("probe")
hub.log({"loss": float("nan"), "loss/loss": 2.0, "same": 1.0}, step=1)
hub.log({"same": 3.0})
hub.finish()
"""


def test_clearml_warns_about_nan_instead_of_recording_zero(tmp_path: Path) -> None:
    pytest.importorskip("clearml")
    done = subprocess.run(
        [sys.executable, "-c", CLEARML],
        cwd=tmp_path,
        env=probe.environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "'loss' is nan, which ClearML would record as 0" in done.stderr, done.stderr
    (file,) = tmp_path.rglob("metrics.jsonl")
    events = [event for line in file.read_text().splitlines() for event in json.loads(line)]
    found = {(e["metric"], e["iter"], e["value"]) for e in events if "value" in e}
    assert found == {("loss/loss", 1, 2.0), ("same", 1, 1.0), ("same", 2, 3.0)}
