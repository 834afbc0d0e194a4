"""Behaviour of DiLoCo that the conformance suite does not check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_core import Accelerator, DiLoCoSettings
from accelerate_core.errors import ConfigurationError
from accelerate_testing import run_workers

WORKER = Path(__file__).with_name("worker.py")


def train(steps: int, **settings: Any) -> list[dict[str, Any]]:
    run = run_workers(WORKER, 2, [steps, json.dumps(settings)], timeout=120)
    assert run.ok, run.story
    return run.results


def test_sync_every_step_with_plain_outer_sgd_averages_after_every_step() -> None:
    ranks = train(20, sync_every=1, outer_lr=1.0, outer_momentum=0.0)
    for rank in ranks:
        losses, weights = rank["plain"]
        assert rank["backend"] == "diloco"
        assert rank["outer_steps"] == 20
        assert rank["losses"] == pytest.approx(losses, abs=1e-5)
        assert rank["weights"] == pytest.approx(weights, abs=1e-5)
    assert ranks[0]["weights"] == ranks[1]["weights"]


def test_ranks_communicate_in_every_eighth_step_only() -> None:
    ranks = train(24, sync_every=8)
    for rank in ranks:
        assert [step for step, calls in enumerate(rank["calls"], 1) if calls] == [8, 16, 24]
        # A reduction also sends a digest of the structure, and the first one is preceded by a small message.
        assert rank["calls"][15] == rank["calls"][23] == 1
        assert 0 <= rank["bytes"] - 3 * rank["model_bytes"] <= 4 * 1024
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert ranks[0]["losses"][-8:] != pytest.approx(ranks[0]["plain"][0][-8:], abs=1e-5)


def test_outer_steps_are_counted_once_and_reset_by_a_checkpoint_of_another_backend(
    tmp_path: Path,
) -> None:
    def begin(**arguments: Any) -> tuple[Accelerator, list[Any], list[Any]]:
        accelerator = Accelerator(cpu=True, **arguments)
        models = [torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)]
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
        made = accelerator.prepare(*models, *optimizers)
        return accelerator, list(made[:2]), list(made[2:])

    other, _, _ = begin(backend="single")
    other.save_state(tmp_path / "other")
    other.end_training()
    accelerator, models, optimizers = begin(diloco_plugin=DiLoCoSettings(sync_every=2))
    for _ in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.diloco_outer_steps == 2
    accelerator.save_state(tmp_path / "own")
    accelerator.load_state(tmp_path / "other")
    assert accelerator.diloco_outer_steps == 0
    accelerator.load_state(tmp_path / "own")
    assert accelerator.diloco_outer_steps == 2
    accelerator.end_training()


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="sync_every"):
        DiLoCoSettings(sync_every=0)
    with pytest.raises(ConfigurationError, match="outer_momentum"):
        DiLoCoSettings(outer_momentum=1.0)
