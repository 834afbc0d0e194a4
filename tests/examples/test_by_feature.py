"""The scripts of examples/by_feature work as described, on one process and on two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support import run_workers
from torch import nn
from warm_python import warm_python

EXAMPLES = Path(__file__).parents[2] / "examples"
WORKER = Path(__file__).with_name("by_feature_worker.py")
SCRIPTS = {path.stem for path in (EXAMPLES / "by_feature").glob("*.py")} - {"digits"}


def launch(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [warm_python(), *command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=[1, 2])
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, Path, list[dict[str, Any]]]:
    """Run all scripts in one launch, because starting processes takes longer than a script."""
    processes, folder = request.param, tmp_path_factory.mktemp("by_feature")
    run_workers(
        WORKER, processes, [folder], timeout=200, env={"ACCELERATE_USE_CPU": "true"}
    ).checked()
    ranks = [json.loads((folder / f"results{r}.json").read_text()) for r in range(processes)]
    return processes, folder, ranks


@pytest.mark.dist
def test_every_script_works_as_described(results: tuple[int, Path, list[dict[str, Any]]]) -> None:
    processes, folder, ranks = results
    assert all(set(made) == SCRIPTS for made in ranks)
    made = ranks[0]
    batches = -(-1437 // (16 * processes))
    accumulated = made["accumulation"]
    assert accumulated["batches"] == 3 * batches
    assert accumulated["taken"] == 3 * -(-batches // 4)
    assert accumulated["last"] < accumulated["first"]
    tokens = made["accumulation_autoregressive"]
    assert tokens["last"] < tokens["first"]
    assert made["checkpointing"]["parts"] == made["checkpointing"]["whole"]
    assert min(made["cross_validation"]["folds"]) > 0.7
    assert made["cross_validation"]["tested"] == 360
    assert made["early_stopping"]["steps"] < made["early_stopping"]["most"]
    assert all(rank["early_stopping"] == made["early_stopping"] for rank in ranks)
    assert len(set(made["local_sgd"]["sums"])) == 1
    assert len(made["local_sgd"]["sums"]) == processes
    tried = made["batch_size_by_memory"]["tried"]
    assert tried[0] == 512
    assert 150 < tried[-1] <= 200 < tried[-2]
    metrics = made["multi_process_metrics"]
    assert (metrics["counted"], metrics["in_order"]) == (360, True)
    assert made["profiling"]["linear"]
    assert len(made["profiling"]["traces"]) == processes
    rate = made["schedule"]
    assert rate["last"] < 1e-4 < rate["first"] < rate["most"] <= 3e-3
    shown = launch(folder, "-m", "accelerate_core", "runs", "show", "tracking", "--json")
    (run,) = json.loads(shown)
    assert len(run["curves"]["loss"]) == made["tracking"]["steps"]


@pytest.mark.dist
def test_accumulating_tokens_is_exact(results: tuple[int, Path, list[dict[str, Any]]]) -> None:
    """The result is the same as in plain PyTorch with all lines of a cycle in one batch."""
    processes, _, ranks = results
    moved = {rank["accumulation_autoregressive"]["moved"] for rank in ranks}
    assert len(moved) == 1
    if processes == 1:
        assert moved.pop() == pytest.approx(_moved_plainly(), rel=1e-4)


def _moved_plainly() -> float:
    sys.path.insert(0, str(EXAMPLES / "by_feature"))
    from accumulation_autoregressive import IGNORED, lines, padded

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(128, 32), nn.Linear(32, 128))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    every = lines()
    for _ in range(2):
        for start in range(0, len(every), 4):  # two batches of two lines
            inputs, targets = padded(every[start : start + 4])
            logits = model(inputs).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
    after = [p.detach() for p in model.parameters()]
    return sum((a - b).abs().sum().item() for a, b in zip(after, before, strict=True))


@pytest.mark.dist
def test_notebook_runs(tmp_path: Path) -> None:
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "cells.py").write_text("\n\n".join(code))
    output = launch(tmp_path, "cells.py")
    assert "epoch 3" in output
    assert "processes 2" in output


@pytest.mark.dist
def test_config_template_trains(tmp_path: Path) -> None:
    """test_config_files makes a dry run of all templates."""
    script = str(EXAMPLES / "by_feature" / "multi_process_metrics.py")
    template = EXAMPLES / "config_templates" / "ddp.yaml"
    assert yaml.safe_load(template.read_text())["num_processes"] == 2
    command = ("-m", "accelerate_core", "launch", "--config_file", str(template), script)
    assert "of 360 right" in launch(tmp_path, *command)
