"""The quickstart learns the digits on two processes, and its model evaluates equally on any number."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from support import run_workers
from warm_python import warm_python

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.py"
TIMEOUT = 240
#: Environment of ranks from the pool: the variable that `launch --cpu` sets, and the table width.
ON_CPU = {"ACCELERATE_USE_CPU": "true", "COLUMNS": "80"}

pytestmark = pytest.mark.dist


class Trained(NamedTuple):
    folder: Path
    output: str

    @property
    def correct(self) -> int:
        return int(re.search(r"│ correct +│ (\d+) of 359 +│", self.output)[1])  # type: ignore[index]


def quickstart(processes: int, *arguments: str | Path) -> str:
    """Launch the quickstart, and return its output."""
    hidden = ("ACCELERATE_", "TORCHELASTIC_", "MASTER_")
    env = {name: text for name, text in os.environ.items() if not name.startswith(hidden)}
    env |= {"ACCELERATE_CONFIG_HOME": os.devnull, "PYTHONIOENCODING": "utf-8", "COLUMNS": "80"}
    launch = "-m", "accelerate_core.cli", "launch", "--cpu", "--num_processes", str(processes)
    process = subprocess.Popen(
        [warm_python(), *launch, str(QUICKSTART), *map(str, arguments)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        pytest.fail(f"still running after {TIMEOUT} s:\n{output}\n{errors}")
    assert process.returncode == 0, output + errors
    return output


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("quickstart")
    return Trained(folder, quickstart(2, "--output_dir", folder))


def test_learns_the_digits(trained: Trained) -> None:
    assert trained.correct / 359 >= 0.97


def test_table_is_printed_once(trained: Trained) -> None:
    output = trained.output
    assert output.count("Handwritten digits") == 1
    assert re.search(r"│ processes +│ 2 +│", output)
    assert re.search(r"│ precision +│ no +│", output)
    for row in ("device", "epochs", "train time", "test accuracy", "correct"):
        assert len(re.findall(rf"│ {row} +│", output)) == 1
    assert f"│ {100 * trained.correct / 359:.2f}%" in output


def test_progress_is_printed_once(trained: Trained) -> None:
    epochs = re.findall(r"^epoch +(\d+)/(\d+)  loss \S+  test accuracy \S+%$", trained.output, re.M)
    assert [int(epoch) for epoch, _ in epochs] == list(range(1, int(epochs[0][1]) + 1))
    assert len(re.findall(r"^training ", trained.output, re.M)) == 1


def test_learning_curve_is_a_png(trained: Trained) -> None:
    content = (trained.folder / "learning_curve.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert width > 400
    assert height > 200
    assert content[-8:-4] == b"IEND"


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_saved_model_evaluates_equally_on_any_number_of_processes(
    trained: Trained, processes: int
) -> None:
    arguments = ["--eval_only", trained.folder, "--batch_size", "32"]
    run = run_workers(QUICKSTART, processes, arguments, timeout=TIMEOUT, env=ON_CPU).checked()
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert lines == [{"correct": trained.correct, "total": 359, "processes": processes}]


def test_mixed_precision_can_be_set_by_a_flag(tmp_path: Path) -> None:
    output = quickstart(2, "--mixed_precision", "bf16", "--epochs", "6", "--output_dir", tmp_path)
    assert re.search(r"│ precision +│ bf16 +│", output)
    assert Trained(tmp_path, output).correct / 359 >= 0.9
