"""The traceback of a mistake ends at the user's line, for every object and method."""

from __future__ import annotations

import re
from pathlib import Path

import dummies
import pool
import pytest
from support import clean_environment

OURS = re.compile(r'File "[^"]*/accelerate_\w+/')
FRAME = re.compile(r'File "(.*?)", line (\d+)')

HEAD = """
import torch
from torch.utils.data import DataLoader, Dataset
from accelerate_core import Accelerator, PartialState, ProjectConfiguration, set_seed

class Unreadable(Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): raise ValueError("in my dataset")

class Unsavable:
    def state_dict(self): raise ValueError("in my state")
    def load_state_dict(self, state): pass

def prepared(**arguments):
    accelerator = Accelerator(cpu=True, project_dir="project", log_with="jsonl", **arguments)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader([torch.zeros(2)] * 4, batch_size=2)
    return accelerator, *accelerator.prepare(model, optimizer, loader)
"""
SETUP = "accelerator, model, optimizer, loader = prepared()\n"

#: The last line of the script -> the expected last line of its output.
MISTAKES = {
    "accelerator.log({'loss': 1})": "TrackerError: log: the trackers",
    "accelerator.get_tracker('nowhere')": "ConfigurationError: There is no tracker",
    "accelerator.init_trackers('a'); accelerator.init_trackers('a')": "TrackerError: The trackers",
    "accelerator.init_trackers('a'); accelerator.log_images({'x': torch.zeros(2)})": (
        "ConfigurationError: log_images: 'x' has the shape"
    ),
    "accelerator.save_state()": "CheckpointError: save_state() got no directory",
    "accelerator.load_state('nowhere')": "CheckpointError: There is no checkpoint directory",
    "accelerator.register_for_checkpointing(3)": "ConfigurationError: register_for_checkpointing",
    "accelerator.reduce(torch.zeros(2), 'summ')": "ConfigurationError: reduce() received",
    "accelerator.bakward(3)": "UnknownNameError: Accelerator has no attribute 'bakward'",
    "accelerator.state.devise": "UnknownNameError: AcceleratorState has no attribute 'devise'",
    "accelerator.gradient_accumulation_steps = 0": "ConfigurationError: gradient_accumulation_steps",
    "accelerator.backward(model(torch.zeros(3, 2)))": "ConfigurationError: backward(loss=...)",
    "accelerator.clip_grad_norm_(model.parameters(), '1.0')": "ConfigurationError: clip_grad_norm_(",
    "accelerator.clip_grad_value_(model.parameters(), None)": "ConfigurationError: clip_grad_value_(",
    "accelerator.clip_grad_norm_(model, 1.0)": "ConfigurationError: Gradient clipping takes",
    "loader.load_state_dict({'a': 1})": "ConfigurationError: The state is not the position",
    "accelerator.skip_first_batches(3, 1)": "ConfigurationError: A int is not a data loader",
    "from accelerate_core import Acelerator": "MissingPluginError: module 'accelerate_core' has no",
    "import accelerate_core; accelerate_core.Acelerator": "UnknownNameError: module",
}


def printed(script: Path, lines: str, **environ: str) -> str:
    script.write_text(HEAD + lines)
    done = pool.run([str(script)], clean_environment(**environ), 60)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr


@pytest.mark.parametrize("line", MISTAKES)
def test_traceback_of_a_mistake_ends_at_the_users_line(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    setup = "" if "import accelerate_core" in line else SETUP
    output = printed(tmp_path / "train.py", f"{setup}{line}\n")
    file, number = FRAME.findall(output)[-1]
    lines = (HEAD + setup + line).count("\n") + 1
    assert (file, int(number)) == (str(tmp_path / "train.py"), lines), output
    assert not OURS.search(output), output
    assert output.count("Traceback (most recent call last)") == 1, output
    assert output.strip().splitlines()[-1].startswith(f"accelerate_core.errors.{MISTAKES[line]}"), (
        output
    )
    assert "hook '" not in output, output


def test_debug_mode_shows_every_frame(tmp_path: Path) -> None:
    output = printed(
        tmp_path / "train.py", f"{SETUP}accelerator.save_state()\n", ACCELERATE_DEBUG_MODE="1"
    )
    assert OURS.search(output)


def test_error_in_a_dataset_looks_the_same_as_without_accelerate_core(tmp_path: Path) -> None:
    loop = "for batch in {}: pass\n"
    plain = printed(tmp_path / "train.py", f"{SETUP}{loop.format('DataLoader(Unreadable())')}")
    prepare = "accelerator.prepare(DataLoader(Unreadable()))"
    ours = printed(tmp_path / "train.py", f"{SETUP}{loop.format(prepare)}")
    assert not OURS.search(ours), ours
    assert FRAME.findall(plain) == FRAME.findall(ours)
    assert ours.endswith("ValueError: in my dataset\n")


def test_error_while_saving_an_object_keeps_the_users_line(tmp_path: Path) -> None:
    lines = "accelerator.register_for_checkpointing(Unsavable())\naccelerator.save_state('there')\n"
    output = printed(tmp_path / "train.py", SETUP + lines)
    assert "in state_dict" in output, output
    assert not OURS.search(output), output


def test_suggestion_is_printed_once(tmp_path: Path) -> None:
    output = printed(tmp_path / "train.py", f"{SETUP}accelerator.bakward(3)\n")
    assert output.count("Did you mean") == 1, output


def test_internal_error_keeps_its_frames(tmp_path: Path) -> None:
    """It may be a bug in accelerate-core, and a bug report needs the frames."""
    output = printed(tmp_path / "train.py", f"{SETUP}accelerator.get_state_dict(3)\n")
    assert OURS.search(output), output


def test_failing_function_at_start_is_named_and_the_run_continues(tmp_path: Path) -> None:
    dummies.distribution(tmp_path, "late", "def begin(): 1 / 0\n", {"at_start": {"x": "begin"}})
    code = "from accelerate_core import Accelerator; print(Accelerator(cpu=True).num_processes)"
    done = pool.run(["-c", code], clean_environment(PYTHONPATH=str(tmp_path)), 60)
    assert done.stdout == "1\n", done.stderr
    assert "dummy_late:begin failed: ZeroDivisionError: division by zero" in done.stderr
