"""Backends that cannot give gradients: the last step boundary is saved, and done again from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from accelerate_core import Accelerator, Backend
from accelerate_core.utils import ProjectConfiguration, set_seed


class Reticent(Backend):
    """Trains as one process does, and keeps its gradients to itself."""

    name = "reticent"
    api_version = (1, 0)
    reduces_gradients = "never"
    supports = {"gradients": False}


class Counter:
    def __init__(self) -> None:
        self.state = {"batches": 0, "mean": torch.zeros(1)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Run:
    """Dropout, a running mean, shuffling, a counter that moves with every micro-batch."""

    def __init__(self, folder: Path) -> None:
        set_seed(3)
        config = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
        self.accelerator = Accelerator(
            cpu=True, backend=Reticent, project_config=config, gradient_accumulation_steps=4
        )
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        decay = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.9)
        data = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
        loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
        self.net, self.counter = net, Counter()
        held_out = torch.utils.data.TensorDataset(torch.randn(6, 4), torch.randn(6, 1))
        self.held_out = self.accelerator.prepare(torch.utils.data.DataLoader(held_out))
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            net, sgd, decay, loader
        )
        self.accelerator.register_for_checkpointing(self.counter)
        set_seed(4)

    def train(self, until: int, save_at: tuple[int, ...] = (), **how: Any) -> None:
        """Go on until so many micro-batches were seen in all, over epochs of twelve."""
        while self.counter.state["batches"] < until:
            for x, y in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(mse_loss(self.model(x), y))
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.counter.state["batches"] += 1
                self.counter.state["mean"] += x.mean()
                if self.counter.state["batches"] in save_at:
                    self.accelerator.save_state(**how)
                if self.counter.state["batches"] == until:
                    break
            self.evaluate()

    def evaluate(self) -> None:
        torch.rand(3)  # what happens between epochs draws too
        with torch.no_grad():
            for x, _ in self.held_out:
                self.net.eval()(x)
        self.net.train()

    def all(self) -> torch.Tensor:
        values = [*self.net.state_dict().values(), self.counter.state["mean"]]
        return torch.cat([value.double().flatten() for value in values])


@pytest.mark.filterwarnings("ignore:The backend 'reticent'")
@pytest.mark.parametrize("blocking", [True, False])
def test_micro_batches_since_the_boundary_are_done_again(tmp_path: Path, blocking: bool) -> None:
    straight = Run(tmp_path / "straight")
    straight.train(24)
    broken = Run(tmp_path / "broken")
    broken.train(15, tuple(range(1, 16)), blocking=blocking)
    broken.accelerator.end_training()
    for at in range(1, 16):
        directory = tmp_path / "broken" / "checkpoints" / f"checkpoint_{at - 1}"
        assert not (directory / "gradients_0.bin").exists()
        resumed = Run(tmp_path / "resumed")
        set_seed(99)
        resumed.accelerator.load_state(directory)
        assert resumed.counter.state["batches"] == at // 4 * 4
        resumed.train(24)
        assert torch.equal(resumed.all(), straight.all()), at


def test_a_save_changes_nothing_and_says_what_it_does(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(6)
    before = run.all()
    with pytest.warns(UserWarning, match="last step boundary, 2 micro-batches ago"):
        run.accelerator.save_state()
    assert torch.equal(run.all(), before)


def test_gradients_that_are_lost_are_said_to_be(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.accelerator.backward(run.model(torch.randn(2, 4)).sum())
    with pytest.warns(UserWarning, match="leaves them out"):
        run.accelerator.save_state()
    run.optimizer.step()
