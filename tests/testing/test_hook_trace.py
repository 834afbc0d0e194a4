"""`plugins hooks --trace` and `ACCELERATE_DEBUG_HOOKS`: which hooks ran, from which plugin."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import dummies
import pytest
from support import clean_environment, run_workers

from accelerate_core import Accelerator

EXTENSION = """
class Extension:
    name = "seen"
    api_version = (1, 0)
    def convert(self, accelerator, model): return model
    def on_step_end(self, optimizer): pass
    def state_attributes(self): return {}
    def on_end(self, accelerator): accelerator.hooks.data_shard()
"""
SCRIPT = """
import sys, torch
from accelerate_core import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3):
    accelerator.backward(model(torch.ones(4, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()
accelerator.gather(torch.ones(1))
print("the script has", *sys.argv[1:])
accelerator.end_training()
sys.exit(3)
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    dummies.distribution(tmp_path, "seen", EXTENSION, {"extensions": {"seen": "Extension"}})
    (tmp_path / "script.py").write_text(SCRIPT)
    made = clean_environment(ACCELERATE_PLUGINS="seen", OMP_NUM_THREADS="1")
    made["PYTHONPATH"] = f"{tmp_path}:{made['PYTHONPATH']}"
    return made


def traced(folder: Path, environ: dict[str, str], *options: str) -> Any:
    command = [sys.executable, "-m", "accelerate_core", "plugins", "hooks", "--trace", *options]
    command += ["--", str(folder / "script.py"), "--lr", "3"]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)


def test_the_trace_of_one_process_is_a_table_in_the_order_of_the_first_calls(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    done = traced(tmp_path, environ)
    assert done.returncode == 3, done.stderr
    assert "the script has --lr 3" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    table = {row[0]: row[1:4] for row in rows if len(row) == 5}
    assert table["device"] == ["owner", "core", "1"]
    assert table["backward"] == ["owner", "core", "3"]
    assert table["convert"] == ["stage", "extension:seen", "1"]
    assert table["on_step_end"] == ["broadcast", "extension:seen", "3"]
    names = [row[0] for row in rows if row]
    order = ("device", "convert", "prepare_model", "backward", "on_step_end", "on_end")
    assert sorted(order, key=names.index) == list(order)


def test_the_trace_of_two_processes_has_every_rank(tmp_path: Path, environ: dict[str, str]) -> None:
    done = traced(tmp_path, environ, "--json", "--num_processes", "2")
    said = json.loads(done.stdout)
    assert said["exit_status"] != 0
    assert list(said["ranks"]) == ["0", "1"]
    for rows in said["ranks"].values():
        found = {(row["hook"], row["kind"], row["plugin"]): row for row in rows}
        assert found["prepare_model", "owner", "backend:ddp"]["calls"] == 1
        assert found["gather", "owner", "core"]["calls"] == 1
        assert found["on_step_end", "broadcast", "extension:seen"]["calls"] == 3
        assert all(row["seconds"] >= 0 for row in rows)


def test_the_variable_logs_every_call_with_rank_nesting_and_duration(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    environ["ACCELERATE_DEBUG_HOOKS"] = "1"
    run = run_workers(tmp_path / "script.py", 2, [], timeout=120, env=environ)
    lines = run.stderr.splitlines()
    for rank in (0, 1):
        mine = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        starts = [line for line in mine if "> " in line]
        ends = [line for line in mine if "< " in line]
        assert len(starts) == len(ends) > 10
        assert all(line.endswith(" ms") for line in ends)
        at = mine.index(f"[rank {rank}] > on_end (extension:seen)")
        assert mine[at + 1] == f"[rank {rank}]   > data_shard (core)"


def test_a_value_that_is_neither_a_switch_nor_a_folder_is_refused(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    environ["ACCELERATE_DEBUG_HOOKS"] = "ture"
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        env=environ, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (
        "ACCELERATE_DEBUG_HOOKS='ture' is neither a boolean nor an existing folder" in done.stderr
    )


def test_without_a_trace_the_backends_own_methods_are_called() -> None:
    accelerator = Accelerator(cpu=True)
    backend = accelerator.backend
    methods = accelerator._setup.owner_methods
    assert methods["backward"].function == backend.backward
    assert methods["optimizer_step"].function == backend.optimizer_step
    accelerator.end_training()
