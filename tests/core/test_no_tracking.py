"""Runs without trackers only use the core, and don't import accelerate-tracking."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from accelerate_core import LoggerType
from accelerate_core.builtin.no_tracking import NoTracking
from accelerate_core.errors import MissingPluginError

SCRIPT = """
import sys
import torch
from accelerate_core import Accelerator
accelerator = Accelerator(cpu=True, log_with=[])
model = accelerator.prepare(torch.nn.Linear(1, 1))
accelerator.init_trackers("project", {"lr": 1}, {"any": {"entity": "me"}})
accelerator.init_trackers("again")
accelerator.log({"loss": object()}, step="any")
accelerator.log_images({"a": [1]})
accelerator.log_table("t", ["a"], [[1]])
accelerator.log_artifact("not there")
accelerator.log_text("t", "text")
accelerator.log_histogram("h", [1])
accelerator.log_figure("f", None)
with accelerator.get_tracker("any").run(nested=True) as run:
    run.summary["best"] = 1
assert not accelerator.get_tracker("any", unwrap=True)
assert accelerator.get_tracker("any").name == "any"
assert accelerator.flush_trackers() == accelerator.trackers == accelerator.log_with == []
accelerator.save_state("checkpoint")
accelerator.load_state("checkpoint")
assert accelerator.resumed_runs == {}
accelerator.end_training()
print([name for name in sys.modules if name.startswith("accelerate_tracking")])
"""


def test_tracking_calls_without_trackers_do_nothing_and_import_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_run_ids_are_loaded_from_a_checkpoint_without_trackers() -> None:
    tracking = NoTracking()
    tracking.load_state_dict({"runs": {"jsonl": "a"}})
    assert tracking.resumed_runs == {"jsonl": "a"}


@pytest.mark.parametrize(
    ("asked", "extra"),
    [
        ("all", "standard"),
        (object(), "standard"),
        (["jsonl"], "tracking"),
        ("wandb", "wandb"),
        ([LoggerType.WANDB, "mine", "mlflow"], "mlflow,wandb"),
    ],
)
def test_error_for_a_missing_tracker_gives_the_install_command(asked: object, extra: str) -> None:
    with pytest.raises(MissingPluginError, match=rf'pip install "accelerate-core\[{extra}\]"'):
        NoTracking(asked)
