"""Goodput: what the time of a run was spent on, also over a restart."""

from __future__ import annotations

import json
import time

import pool
import pytest
import torch
from launched import run_cli
from support import clean_environment

from accelerate_core import Accelerator
from accelerate_watch import GoodputKwargs

SCRIPT = """
import os, sys, time, torch
from pathlib import Path
from accelerate_core import Accelerator, ProjectConfiguration
from accelerate_watch import GoodputKwargs

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.ones(4)

folder, die_at = Path(sys.argv[1]), int(sys.argv[2])
accelerator = Accelerator(
    cpu=True,
    log_with="jsonl",
    project_config=ProjectConfiguration(project_dir=folder, logging_dir=folder),
    kwargs_handlers=[GoodputKwargs(log_every=0.5, tokens_per_sample=10, peak_flops=1e9)],
)
accelerator.init_trackers("digits")
model = torch.nn.Linear(4, 1)
loader = torch.utils.data.DataLoader(Slow(), batch_size=4)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), loader
)
if (folder / "saved").exists():
    accelerator.load_state(folder / "saved")
for step, x in enumerate(loader):
    if step == 0:
        with accelerator.goodput.count_flops():
            accelerator.backward(model(x).square().mean())
    else:
        accelerator.backward(model(x).square().mean())
    time.sleep(0.3)
    optimizer.step()
    optimizer.zero_grad()
    if step == 3 and die_at:
        accelerator.save_state(folder / "saved")
    if step == die_at > 0:
        os._exit(1)
accelerator.log(accelerator.goodput.values(accelerator), step=99)
accelerator.end_training()
"""


def test_restarted_run_reports_lost_steps_and_where_the_time_went(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for die_at, status in ((10, 1), (0, 0)):
        command = [str(script), str(tmp_path), str(die_at)]
        done = pool.run(command, clean_environment(), 120)
        assert done.returncode == status, done.stderr
    shown = run_cli("runs", "show", tmp_path, "--json", forked=True)
    runs = json.loads(shown.stdout)
    last = next(run["summary"] for run in runs if run["status"] == "finished")
    values = {key.removeprefix("goodput/"): facts["last"] for key, facts in last.items()}
    assert values["restarts"] == 1
    assert 1 <= values["lost_steps"] <= 7  # 7 were lost, and the file may be two seconds old
    assert values["restart_seconds"] > 0
    assert values["steps_seconds"] == pytest.approx(19 * 0.3, rel=0.5)
    assert values["data_seconds"] == pytest.approx(19 * 0.08, rel=0.6)
    assert 0 < values["samples_per_second"] < 4 / 0.38 * 1.3
    assert values["tokens_per_second"] == pytest.approx(10 * values["samples_per_second"])
    # Per batch of 4 samples: 2 * 4 * 4 operations forward, and as many for the weights' gradient.
    batches_per_second = values["samples_per_second"] / 4
    assert values["mfu"] == pytest.approx(64 * batches_per_second / 1e9, rel=0.01)
    whole = sum(value for key, value in values.items() if key.endswith("_seconds"))
    kept = 1 - values["lost_steps"] / (12 + values["lost_steps"])
    assert values["fraction"] == pytest.approx(values["steps_seconds"] * kept / whole, rel=0.05)


@pytest.mark.parametrize(("attempt", "restarts", "lost"), [("1", 1, 40), ("0", 0, 0)])
def test_failure_before_the_first_checkpoint_counts_if_the_launcher_restarts(
    tmp_path, monkeypatch: pytest.MonkeyPatch, attempt: str, restarts: int, lost: int
) -> None:
    left = {"seconds": {"steps": 4.0}, "steps": 40, "restarts": 0, "restart_seconds": 0.0}
    (tmp_path / "goodput.json").write_text(
        json.dumps({**left, "lost_steps": 0, "time": time.time() - 5})
    )
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, kwargs_handlers=[GoodputKwargs()])
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(3, 2)).sum())
    optimizer.step()
    values = accelerator.goodput.values(accelerator)
    accelerator.end_training()
    assert (values["goodput/restarts"], values["goodput/lost_steps"]) == (restarts, lost)
    assert (values["goodput/restart_seconds"] >= 5) == bool(restarts)


def test_goodput_needs_its_handler() -> None:
    with pytest.raises(AttributeError, match="goodput"):
        _ = Accelerator(cpu=True).goodput
    accelerator = Accelerator(cpu=True, kwargs_handlers=[GoodputKwargs()])
    meter = accelerator.goodput
    time.sleep(0.3)
    assert meter.totals()["seconds"]["starting"] > 0.1
    meter.stop()
