"""Failures show each traceback once, and for an invalid setting only the user's own lines."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pool
import pytest
from launched import run_cli
from support import clean_environment
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from accelerate_launch import uncaught
from accelerate_launch.failures import describe, describe_function, held

HEAD = "Traceback (most recent call last):"
OURS = re.compile(r'File "[^"]*/accelerate_\w+/')

SCRIPT = """
import os, sys, time
from accelerate_core import Accelerator

how = sys.argv[1]
precision = "fp17" if how == "setting" else "no"
accelerator = Accelerator(cpu=True, process_group_timeout=60, mixed_precision=precision)
accelerator.wait_for_everyone()
if how == "fail" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and not accelerator.process_index:
    raise KeyError("mine")
if how == "fail":
    raise ValueError("mine")
accelerator.wait_for_everyone()
time.sleep(20)
"""


def launched(folder: Path, how: str, *options: str) -> str:
    (folder / "train.py").write_text(SCRIPT)
    options = ("--cpu", "--num_processes", "2", *options)
    done = run_cli("launch", *options, "train.py", how, cwd=folder)
    assert done.returncode == 1
    return done.stderr


@pytest.mark.dist
def test_each_distinct_traceback_is_shown_once(tmp_path: Path) -> None:
    said = launched(tmp_path, "fail", "--max_restarts", "1")
    first, last = said.split("Restarting all processes.")
    assert first.count(HEAD) == 2
    assert "ValueError: mine" in first
    assert "KeyError: 'mine'" in first
    assert last.count(HEAD) == 1
    assert "ValueError: mine" in last
    assert re.search(r"Failed with the same traceback: rank [01]\.", last)


@pytest.mark.dist
def test_invalid_setting_under_launch_shows_one_traceback_without_internal_frames(
    tmp_path: Path,
) -> None:
    said = launched(tmp_path, "setting")
    assert said.count(HEAD) == said.count("Did you mean 'fp16'") == 1
    assert not OURS.search(said)
    assert "train.py" in said


ATTRIBUTES = """
import torch
from accelerate_core import Accelerator
from accelerate_launch.attribute_hint import add_attribute_hint

class Net(torch.nn.Linear):
    size = 3
    def predict(self):
        return self.absent

accelerator = Accelerator(cpu=True)
model, other = accelerator.prepare(Net(1, 1), torch.nn.Linear(1, 1))
assert not hasattr(model, "predict")

def notes(read):
    try:
        read()
    except Exception as error:
        add_attribute_hint(error)
        add_attribute_hint(error)
        found = error.__cause__ or error
        return [note for note in getattr(found, "__notes__", []) if "unwrap_model" in note]

def chained():
    try:
        model.predict()
    except AttributeError as error:
        raise RuntimeError("no prediction") from error

assert len(notes(lambda: model.size)) == 1
assert len(notes(lambda: torch.compile(model).size)) == 1
assert len(notes(chained)) == 1
assert notes(lambda: model.nothing) == []
assert notes(lambda: other.predict) == []
assert notes(lambda: accelerator.unwrap_model(model).predict()) == []
assert notes(lambda: "text".predict) == []
model.predict()
"""


@pytest.mark.dist
def test_missing_attribute_of_a_wrapped_model_names_unwrap_model(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ATTRIBUTES)
    done = run_cli("launch", "--cpu", "--num_processes", "2", "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "AttributeError: 'DistributedDataParallel' object has no" in done.stderr, done.stderr
    assert done.stderr.count("use accelerator.unwrap_model(model).predict") == 1


def record(folder: Path, rank: int, error: Exception, left: bool) -> ProcessFailure:
    file = folder / str(rank) / "error.json"
    file.parent.mkdir()
    assert uncaught.record(error, file, left) is left
    return ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=1, error_file=str(file))


def raised(text: str) -> Exception:
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


def test_failed_rank_that_does_not_exit_is_shown_early(tmp_path: Path) -> None:
    failure = record(tmp_path, 1, raised("stuck"), True)
    file = failure.error_file
    nothing = str(tmp_path / "0" / "error.json")  # for a rank that has not failed
    processes = SimpleNamespace(error_files={0: nothing, 1: file})
    assert held(processes) == ""
    os.utime(file, (0, 0))
    assert held(processes).count("ValueError: stuck") == 1
    assert held(processes) == ""
    text, _ = describe({1: failure})
    assert "ValueError: stuck (traceback above)" in text
    assert HEAD not in text


def test_failures_at_one_place_are_shown_once_and_printed_tracebacks_are_not_repeated(
    tmp_path: Path,
) -> None:
    made = {rank: record(tmp_path, rank, raised(f"on {rank}"), True) for rank in range(3)}
    text, status = describe(made)
    assert status == 1
    assert text.count(HEAD) == 1
    assert "Rank 2 failed at the same place: ValueError: on 2" in text
    assert describe(made, brief=True)[0].count("ValueError: on") == 1
    printed = {3: record(tmp_path, 3, raised("shown by a hook"), False)}
    text, _ = describe(printed)
    assert "ValueError: shown by a hook (traceback above)" in text
    assert HEAD not in text


def test_rank_stopped_while_exiting_is_reported_with_its_exception(tmp_path: Path) -> None:
    file = record(tmp_path, 0, raised("mine"), True).error_file
    text, status = describe({0: ProcessFailure(0, 100, -signal.SIGTERM, file)})
    assert status == 1
    assert "failed: exit status 1, process 100" in text
    wrote_nothing = str(tmp_path / "1" / "error.json")
    text, status = describe({1: ProcessFailure(1, 101, -signal.SIGTERM, wrote_nothing)})
    assert status == 128 + signal.SIGTERM
    assert "killed by SIGTERM; process 101" in text


MISMATCH = """
import torch
from accelerate_core import Accelerator

accelerator = Accelerator(cpu=True, process_group_timeout=60)
# accelerator.gather would compare the shapes.
sent = torch.ones(5000 if accelerator.process_index else 16, dtype=torch.uint8)
accelerator.communicator.gather(sent)
"""


@pytest.mark.dist
def test_abort_in_a_collective_recommends_debug_mode(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MISMATCH)
    options = ("launch", "--cpu", "--num_processes", "2")
    done = run_cli(*options, "train.py", cwd=tmp_path)
    assert done.returncode == 128 + signal.SIGABRT
    said = done.stderr.split("killed by SIGABRT")[1]
    assert "run again with --debug" in said
    line = len(MISMATCH.splitlines())
    assert f"This happened in gather, called at {tmp_path / 'train.py'} line {line}:" in said
    assert 'File "' in said  # the stack of the rank that failed first


def test_mismatch_raised_by_gloo_recommends_debug_mode(tmp_path: Path) -> None:
    text = "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] 8 vs 4."
    described, _ = describe({0: record(tmp_path, 0, raised(text), True)})
    assert "run again with --debug" in described
    assert "run again with --debug" in describe_function(
        {0: record(tmp_path, 2, raised(text), True)}
    )
    described, _ = describe({1: record(tmp_path, 1, raised("mine"), True)})
    assert "run again" not in described


BAD = {
    "argument": ("Accelerator(cpu=True, mixed_precision='fp17')", {}),
    "unknown argument": ("Accelerator(cpus=True)", {}),
    "environment": ("Accelerator()", {"ACCELERATE_MIXED_PRECISION": "fp17"}),
    "file": ("Accelerator()", {"ACCELERATE_CONFIG_FILE": "nowhere.yaml"}),
    "rank": ("PartialState()", {"RANK": "abc", "WORLD_SIZE": "2"}),
    "handler": ("DataLoaderConfiguration(split_batch=True)", {}),
    "missing": ("Accelerator(backend='nowhere')", {}),
    "launcher": ("notebook_launcher(print, num_processes=-1)", {}),
}
IMPORTS = "from accelerate_core import Accelerator, DataLoaderConfiguration, PartialState\n"
IMPORTS += "from accelerate_launch import notebook_launcher\n"


@pytest.mark.parametrize("cause", BAD)
def test_invalid_setting_in_a_script_shows_only_the_users_line(cause: str, tmp_path: Path) -> None:
    line, environ = BAD[cause]
    script = tmp_path / "train.py"
    script.write_text(f"{IMPORTS}def main():\n    {line}\nmain()\n")
    done = pool.run([str(script)], clean_environment(**environ), 60)
    assert done.returncode == 1
    assert not OURS.search(done.stderr), done.stderr
    assert "direct cause" not in done.stderr
    assert f'File "{script}", line 4, in main' in done.stderr
    assert "accelerate_core." in done.stderr.strip().splitlines()[-1]  # the error's class, and text
    if cause == "argument":
        debug = pool.run([str(script)], clean_environment(ACCELERATE_DEBUG_MODE="1"), 60)
        assert OURS.search(debug.stderr)


def test_other_errors_keep_all_frames(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{IMPORTS}Accelerator(cpu=True).get_state_dict(3)\n")
    done = pool.run([str(script)], clean_environment(), 60)
    assert OURS.search(done.stderr), done.stderr


COMMANDS = {
    "launch": ["--cpu", "s.py"],
    "plugins": [],
    "plugins why": ["ddp"],
    "env": [],
    "config show": [],
    "config validate": [],
    "test": [],
    "estimate-memory": ["nowhere.bin"],
    "checkpoints list": ["nowhere"],
    "merge-weights": ["nowhere", "there"],
    "runs show": ["nowhere"],
    "to-fsdp2": [],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_shows_a_traceback_for_an_invalid_setting(command: str, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("")
    (tmp_path / "bad.yaml").write_text("num_procesess: 2\n")
    environ = {"ACCELERATE_MIXED_PRECISION": "fp17", "ACCELERATE_CONFIG_FILE": "bad.yaml"}
    words = ["-m", "accelerate_core", *command.split(), *COMMANDS[command]]
    done = pool.run(words, clean_environment(**environ), 60, cwd=tmp_path)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in (0, 1, 2)
