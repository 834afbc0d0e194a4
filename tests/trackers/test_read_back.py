"""All nine libraries together, offline: logged values are in their files or skipped with a warning."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pool
import pytest
from warm_python import warm_python

sys.path.insert(0, str(Path(__file__).parent))
import probe

HERE = Path(__file__).parent
ALL = (*probe.NINE, "jsonl")

for name in probe.NINE:
    if importlib.util.find_spec(f"accelerate_{name}") is None:
        pytest.skip(f"accelerate-{name} is not installed", allow_module_level=True)

#: Configs of libraries that change some values.
AS_TEXT = {
    "mlflow": {key: str(value) for key, value in probe.PLAIN_CONFIG.items()},
    "swanlab": {**probe.PLAIN_CONFIG, "seed": "None"},
    "tensorboard": {
        **probe.PLAIN_CONFIG,
        "layers": "[16, 8]",
        "betas": "[0.9, 0.99]",
        "seed": "null",
    },
}


#: Modules that the libraries import. The libraries themselves are not among them, because some read
#: variables during their import, and neither is `pyplot`, which the tracker of wandb has to import.
WARM = (
    "alembic.command", "botocore.session", "dulwich.repo", "fastapi", "hydra", "matplotlib.font_manager",
    "opentelemetry.sdk.trace", "pandas", "PIL.Image", "pyarrow", "pyecharts.charts", "scipy.sparse",
    "sqlalchemy.dialects.sqlite", "sqlalchemy.orm",
    "tensorboard.backend.event_processing.event_accumulator",
)  # fmt: skip


def run(
    directory: Path, case: str, log_with: str = "all", rc: int = 0, warm: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run the script `probe.py` and check its exit status.

    `warm=False` starts a real interpreter, which also tears down the libraries at its end.
    """
    command = [str(HERE / "probe.py"), case, log_with]
    environ = probe.environment(directory)
    if warm:
        ended = pool.run(command, environ, 240, cwd=directory, more=WARM)
    else:
        ended = subprocess.run(
            [sys.executable, *command],
            cwd=directory,
            env=environ,
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert ended.returncode == rc, ended.stdout + ended.stderr
    return ended


def read(directory: Path, *names: str) -> dict[str, Any]:
    """Read the files in a separate process."""
    command = [HERE / "readers.py", directory, *names]
    ended = pool.run(command, probe.environment(directory), 240, cwd=directory, more=WARM)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("FOUND")]
    assert lines, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(lines[0].removeprefix("FOUND"))
    for one in found.values():
        one.setdefault("error", "")
    return found


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("full")
    ended = run(directory, "full")
    return ended.stdout + ended.stderr, read(directory)


def test_all_starts_the_nine_libraries_and_jsonl(full: tuple[str, dict[str, Any]]) -> None:
    text, _ = full
    (line,) = [line for line in text.splitlines() if line.startswith("TRACKERS ")]
    assert set(line.removeprefix("TRACKERS ").split(",")) == set(ALL)
    assert "turned off" not in text


@pytest.mark.parametrize("name", ALL)
def test_logged_steps_are_read_back_exactly(full: tuple[str, dict[str, Any]], name: str) -> None:
    assert not full[1][name]["error"]
    values = full[1][name]["values"]
    for key in probe.KEYS:
        wanted = [[step, probe.value(key, step)] for step in range(probe.STEPS)]
        assert values[key] == wanted, key
    assert full[1][name]["texts"]["word"] == "a word"


@pytest.mark.parametrize("name", ALL)
def test_config_is_read_back_with_lists_and_none(
    full: tuple[str, dict[str, Any]], name: str
) -> None:
    config = full[1][name]["config"]
    wanted = AS_TEXT.get(name, probe.PLAIN_CONFIG)
    found = {key: config.get(key, "lacking") for key in wanted}
    if name == "dvclive":  # YAML 1.1 parses 1e-08 as a string
        found["optimizer/eps"] = float(found["optimizer/eps"])
    assert found == wanted


@pytest.mark.parametrize("name", ALL)
def test_batch_of_images_is_read_back_exactly(full: tuple[str, dict[str, Any]], name: str) -> None:
    images = full[1][name]["images"]
    batch = probe.images().tolist()
    assert [images["picture/0"], images["picture/1"]] == batch


@pytest.mark.parametrize("name", ALL)
def test_table_is_read_back_or_skipped_with_a_warning(
    full: tuple[str, dict[str, Any]], name: str
) -> None:
    text, found = full
    wanted = [probe.COLUMNS, *probe.ROWS]
    if name == "aim":
        assert "log_table is skipped for trackers that do not support it: 'aim'" in text
    elif name == "tensorboard":
        assert found[name]["table"].splitlines()[2:] == ["| x | 1 |", "| y | 2 |"]
    elif name == "comet_ml":
        assert found[name]["table"] == [[str(cell) for cell in row] for row in wanted]
    else:
        assert found[name]["table"] == wanted


WITHOUT_TEXT = {"dvclive"}
WITHOUT_HISTOGRAM = {"dvclive", "mlflow", "swanlab"}


@pytest.mark.parametrize("name", ALL)
def test_texts_and_histograms_are_read_back_or_skipped_with_a_warning(
    full: tuple[str, dict[str, Any]], name: str
) -> None:
    text, found = full
    skipped = {line for line in text.splitlines() if "is skipped for trackers" in line}
    for verb, without in (("text", WITHOUT_TEXT), ("histogram", WITHOUT_HISTOGRAM)):
        (line,) = [line for line in skipped if f"log_{verb} " in line]
        assert (f"'{name}'" in line) is (name in without)
    if name not in WITHOUT_TEXT:
        assert found[name]["texts"]["note"] == "several words"
    if name not in WITHOUT_HISTOGRAM:
        assert found[name]["histograms"] == ["weights"]


FAILED = {
    "clearml": "failed",
    "jsonl": "failed",
    "mlflow": "FAILED",
    "swanlab": "RUN_STATE_CRASHED",
    "tensorboard": "STATUS_FAILURE",
    "wandb": "failed",
}


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("crashed")
    ended = run(directory, "crash", rc=1, warm=False)
    return ended.stdout + ended.stderr, read(directory)


@pytest.mark.parametrize("name", ALL)
def test_crashed_script_keeps_all_values_and_marks_the_run_failed(
    crashed: tuple[str, dict[str, Any]], name: str
) -> None:
    text, found = crashed
    assert "ValueError: the script is at fault" in text
    assert "turned off" not in text
    assert not found[name]["error"]
    for key in probe.KEYS:
        wanted = [[step, probe.value(key, step)] for step in range(probe.STEPS)]
        assert found[name]["values"][key] == wanted, key
    if name in FAILED:
        assert found[name]["status"] == FAILED[name]


#: Trackers that can continue a run without a server, in files that then hold one run.
LOCAL = ("dvclive", "jsonl", "tensorboard", "trackio")
#: The same, but slow to start. `make conformance` also resumes a run of each.
SLOW = ("aim", "mlflow")

Resumed = tuple[Path, str, dict[str, Any]]


def kill_and_resume(directory: Path, *names: str) -> Resumed:
    """Kill a run of these trackers and resume it. Read those in `LOCAL` and `SLOW`."""
    run(directory, "kill", ",".join(names), rc=-signal.SIGKILL)
    ended = run(directory, "resume", ",".join(names))
    found = read(directory, *(name for name in names if name in LOCAL + SLOW))
    return directory, ended.stdout + ended.stderr, found


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    return kill_and_resume(tmp_path_factory.mktemp("resumed"), *LOCAL, "wandb")


@pytest.fixture(scope="module")
def resumed_slowly(tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    return kill_and_resume(tmp_path_factory.mktemp("slow"), *SLOW)


@pytest.mark.parametrize(
    ("name", "fixture"),
    [
        *((name, "resumed") for name in LOCAL),
        *(pytest.param(name, "resumed_slowly", marks=pytest.mark.soak) for name in SLOW),
    ],
)
def test_killed_run_is_continued(request: pytest.FixtureRequest, name: str, fixture: str) -> None:
    _, text, found = request.getfixturevalue(fixture)
    assert "turned off" not in text
    assert not found[name]["error"]
    for key in probe.KEYS:
        wanted = [[step, probe.value(key, step)] for step in range(2 * probe.STEPS)]
        assert found[name]["values"][key] == wanted, key


def test_wandb_continues_with_the_same_id(resumed: Resumed) -> None:
    directory, text, _ = resumed
    folders = sorted((directory / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    (identity,) = {folder.name.rsplit("-", 1)[1] for folder in folders}
    assert f"'wandb': '{identity}'" in text


def test_accelerates_class_names_are_exported_without_importing_libraries() -> None:
    code = """
import sys
import accelerate_tracking as tracking
from accelerate_core.plugins.discovery import installed
for record in installed().of_kind("tracker"):
    cls = record.load()
    if record.name != "jsonl":
        assert getattr(tracking, cls.__name__) is cls
        assert cls.name == record.name
heavy = {"aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "torch",
         "trackio", "wandb"}
print("HEAVY", sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "HEAVY []"


GROUPED = ("dvclive", "swanlab", "tensorboard", "wandb")


@pytest.mark.dist
def test_ranks_have_runs_in_one_group(tmp_path: Path) -> None:
    command = [str(warm_python()), "-m", "accelerate_core", "launch", "--cpu"]
    command += ["--num_processes", "2"]
    done = subprocess.run(
        [*command, str(HERE / "probe.py"), "ranks", ",".join(GROUPED)],
        cwd=tmp_path,
        env=probe.environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "turned off" not in done.stderr
    for rank in (0, 1):
        assert (tmp_path / "dvclive" / f"rank{rank}" / "plots/metrics/python.tsv").exists()
        assert list((tmp_path / "logs" / "probe" / f"rank{rank}").glob("events.*"))
    assert len(list((tmp_path / "swanlog").glob("run-*"))) == 2
    runs = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(runs) == 2
    groups = {re.search(rb"probe-[0-9a-f]{8}", path.read_bytes()) for path in runs}
    assert len({found[0] for found in groups if found}) == 1


def test_trackio_keeps_values_logged_while_matplotlib_is_imported(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import sys
import threading
import time
import warnings

import numpy

assert not any(name.startswith("matplotlib") for name in sys.modules)
warnings.filterwarnings("error", message=".*skipped metric.*")
from accelerate_trackio import TrackioTracker

tracker = TrackioTracker("probe", auto_log_gpu=False, auto_log_cpu=False)
tracker.start()
imported = threading.Event()
logged = []


def log():
    while not imported.is_set():
        tracker.log({"value": len(logged)})
        logged.append(len(logged))
        time.sleep(0.0001)  # without pauses, this can slow the import down to minutes


thread = threading.Thread(target=log)
thread.start()
while not logged:
    pass
import matplotlib.figure
imported.set()
thread.join()
tracker.finish()

from trackio.sqlite_storage import SQLiteStorage
found = SQLiteStorage.get_logs("probe", tracker.run.name)
assert logged
assert [entry.get("value") for entry in found] == logged, (len(found), len(logged))
""",
        encoding="utf-8",
    )
    ended = pool.run([script], probe.environment(tmp_path), 240, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
