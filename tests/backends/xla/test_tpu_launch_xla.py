"""Launches with torch_xla on the CPU, with one process. Several processes would need a TPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from launched import run_cli
from support import clean_environment

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_xla") is None, reason="torch_xla needs its own environment"
)

SCRIPT = """
import json, os, sys

names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "PJRT_DEVICE")
said = {name: os.environ.get(name) for name in names}
said |= {"main": __name__, "arguments": sys.argv[1:], "bf16": os.environ.get("ACCELERATE_DOWNCAST_BF16")}
print(json.dumps(said))
sys.exit("the script's own")
"""

NOTEBOOK = """
import json, os, signal, sys
from accelerate_core import notebook_launcher

outcomes = {}
def outcome(name, function, **more):
    try:
        notebook_launcher(function, **more)
        outcomes[name] = "success"
    except Exception as error:
        outcomes[name] = [type(error).__name__, str(error), getattr(error, "status", None)]

def write_result(path):
    import torch, torch_xla
    total = torch.ones(2, device="xla").sum().item()
    open(path, "w").write(json.dumps([os.environ["RANK"], os.environ["WORLD_SIZE"], total]))

def fail():
    raise KeyError("the cell's own")

path = sys.argv[1]
outcome("closure", lambda: write_result(path))
outcome("raises", fail)
outcome("leaves", lambda: sys.exit(3))
outcome("killed", lambda: os.kill(os.getpid(), signal.SIGKILL))
outcome("several", lambda: None, num_processes=2)
one = []
outcome("one", lambda: one.append(os.environ["PJRT_DEVICE"]), num_processes=1)
outcomes["one ran here"] = one
import torch_xla
torch_xla.device()
outcome("touched", lambda: None)
print(json.dumps(outcomes))
"""


def test_script_runs_in_a_process_of_torch_xla(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text(SCRIPT)
    options, environment = ("--tpu", "--downcast_bf16"), {"PJRT_DEVICE": "CPU"}
    done = run_cli("launch", *options, script, "--lr", "1", env=environment)
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    expected = {**rank, "MASTER_ADDR": "127.0.0.1", "PJRT_DEVICE": "CPU", "bf16": "true"}
    expected |= {"main": "__main__", "arguments": ["--lr", "1"]}
    assert json.loads(done.stdout) == expected, done.stderr
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("Rank 0 failed first:\nthe script's own") == 1, done.stderr


def test_missing_tpu_gives_a_one_line_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "accelerate_xla.launch.run", str(tmp_path / "s.py")]
    environment = clean_environment(PJRT_DEVICE="TPU")
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "PJRT_DEVICE is TPU, but this machine has no TPU" in done.stderr
    assert "Traceback" not in done.stderr


def test_notebook_launcher_reports_results_and_failures(tmp_path: Path) -> None:
    (tmp_path / "n.py").write_text(NOTEBOOK)
    out = tmp_path / "out.json"
    more = {"PJRT_DEVICE": "CPU", "ACCELERATE_USE_TPU": "true"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "n.py"), str(out)],
        env=clean_environment(**more),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert outcomes["closure"] == "success", outcomes
    assert json.loads(out.read_text()) == ["0", "1", 2.0]
    name, text, status = outcomes["raises"]
    assert (name, status) == ("RankFailedError", 1)
    assert "Rank 0 failed first:" in text
    assert 'KeyError: "the cell\'s own"' in text
    assert outcomes["leaves"][1:] == ["Rank 0 failed first:\nexit status 3", 3]
    assert "ended without an error message" in outcomes["killed"][1]
    assert outcomes["several"][0] == "ConfigurationError"
    assert "does not connect processes" in outcomes["several"][1]
    assert (outcomes["one"], outcomes["one ran here"]) == ("success", ["CPU"])
    assert outcomes["touched"][0] == "RuntimeConflictError"
    assert "already used an XLA device" in outcomes["touched"][1]
