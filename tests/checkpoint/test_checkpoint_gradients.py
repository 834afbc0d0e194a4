"""A save in the middle of an accumulation cycle includes the backend's gradients."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from accelerate_core import Accelerator, Backend
from accelerate_core.errors import CheckpointError
from accelerate_core.utils import ProjectConfiguration, set_seed


class Hoarder(Backend):
    """Moves gradients into its own buffers after each backward, as engines do."""

    name = "hoarder"
    api_version = (1, 0)
    reduces_gradients = "never"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.buffers: dict[nn.Parameter, torch.Tensor] = {}

    def backward(self, accelerator: Any, loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
        super().backward(accelerator, loss, kwargs)
        for model in accelerator.models:
            for parameter in model.parameters():
                held = self.buffers.setdefault(parameter, torch.zeros_like(parameter))
                held += parameter.grad
                parameter.grad = None

    def optimizer_step(self, accelerator: Any, optimizer: Any, closure: Any) -> bool:
        for parameter, held in self.buffers.items():
            parameter.grad = held
        self.buffers = {}
        return super().optimizer_step(accelerator, optimizer, closure)

    def pending_gradients(
        self, accelerator: Any, model: nn.Module, parameters: Any
    ) -> Mapping[str, torch.Tensor]:
        return {name: self.buffers[one] for name, one in model.named_parameters()}

    def load_pending_gradients(
        self, accelerator: Any, model: nn.Module, gradients: Any, factor: float | None
    ) -> None:
        assert factor is None
        self.buffers = {model.get_parameter(name): value for name, value in gradients.items()}


class Reticent(Backend):
    """Declares that it cannot save gradients."""

    name = "reticent"
    api_version = (1, 0)
    reduces_gradients = "never"
    supports = {"gradients": False}


class Counter:
    """Changes with every micro-batch, and counts how often its state is read."""

    def __init__(self) -> None:
        self.state = {"batches": 0, "mean": torch.zeros(1)}
        self.asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Run:
    """Trains with dropout, a running mean, shuffling, a scheduler and a counter, 12 batches an epoch."""

    def __init__(self, folder: Path, backend: Any) -> None:
        set_seed(3)
        config = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
        self.accelerator = Accelerator(
            cpu=True, backend=backend, project_config=config, gradient_accumulation_steps=4
        )
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        decay = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.9)
        data = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
        loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
        self.counter = Counter()
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            net, sgd, decay, loader
        )
        self.accelerator.register_for_checkpointing(self.counter)
        set_seed(4)

    def train(self, until: int, save_at: tuple[int, ...] = (), **how: Any) -> None:
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

    def all(self) -> torch.Tensor:
        values = [*self.model.state_dict().values(), self.counter.state["mean"]]
        return torch.cat([value.double().flatten() for value in values])


@pytest.mark.parametrize("blocking", [True, False])
def test_backend_with_its_own_gradient_buffers_resumes_from_every_micro_batch(
    tmp_path: Path, blocking: bool
) -> None:
    straight = Run(tmp_path / "straight", Hoarder)
    straight.train(24)
    broken = Run(tmp_path / "broken", Hoarder)
    broken.train(15, tuple(range(1, 16)), blocking=blocking)
    broken.accelerator.end_training()
    for at in range(1, 16):
        directory = tmp_path / "broken" / "checkpoints" / f"checkpoint_{at - 1}"
        assert (directory / "gradients_0.bin").exists() == (at % 4 != 0)
        resumed = Run(tmp_path / "resumed", Hoarder)
        set_seed(99)
        resumed.accelerator.load_state(directory)
        assert resumed.counter.state["batches"] == at
        resumed.train(24)
        assert torch.equal(resumed.all(), straight.all()), at


def test_backend_without_gradients_refuses_to_save_inside_a_cycle(tmp_path: Path) -> None:
    run = Run(tmp_path, Reticent)
    run.train(6)
    with pytest.raises(CheckpointError, match=r"when accelerator\.sync_gradients is True"):
        run.accelerator.save_state()
    assert not list((tmp_path / "checkpoints").glob("*"))
    run.train(8)
    run.accelerator.save_state()
    assert (tmp_path / "checkpoints" / "checkpoint_0" / "manifest.json").exists()


@pytest.mark.parametrize("backend", [Hoarder, Reticent])
def test_training_does_not_copy_registered_objects(tmp_path: Path, backend: Any) -> None:
    run = Run(tmp_path, backend)
    run.train(24)
    assert run.counter.asked == 0
