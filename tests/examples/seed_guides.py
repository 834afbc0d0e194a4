"""The code of the quicktour and the README (seeds 002 and 003), with assertions.

Names that an example uses without defining them are in `seed_parts`. The code between "seed" and the
assertions comes from the document, with the corrections listed in `test_seed_examples.MISTAKES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from seed_parts import (
    BATCH,
    MyModel,
    assert_trained_as_plain,
    data,
    parts,
    same_everywhere,
    seed,
    weights,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelerate_core import Accelerator
from accelerate_core.utils import set_seed


@seed("002-adapt training code")
def adapt_training_code(folder: Path) -> None:
    training_dataloader, model, optimizer, scheduler = parts()
    loss_function = F.cross_entropy
    # seed
    accelerator = Accelerator()

    device = accelerator.device
    model, optimizer, training_dataloader, scheduler = accelerator.prepare(
        model, optimizer, training_dataloader, scheduler
    )

    for batch in training_dataloader:
        optimizer.zero_grad()
        inputs, targets = batch
        assert inputs.device.type == device.type
        outputs = model(inputs)
        loss = loss_function(outputs, targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()

    assert_trained_as_plain(accelerator, model, loss_function, scheduled=True)


@seed("002-prepare")
def quicktour_prepare(folder: Path) -> None:
    train_dataloader, model, optimizer, lr_scheduler = parts()
    # seed
    accelerator = Accelerator()
    device = accelerator.device
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )

    assert next(model.parameters()).device.type == device.type
    assert len(train_dataloader) == 8 // accelerator.num_processes


@seed("002-distributed evaluation")
def distributed_evaluation(folder: Path) -> None:
    class Metric:
        predictions: list[list[float]] = []
        targets: list[int] = []

        def add_batch(self, predictions: torch.Tensor, targets: torch.Tensor) -> None:
            self.predictions = self.predictions + predictions.tolist()
            self.targets = self.targets + targets.tolist()

    accelerator, metric = Accelerator(), Metric()
    dataset = data(13)  # not divisible by the batch size of two processes
    set_seed(3)
    model = MyModel().eval().to(accelerator.device)
    validation_dataloader = DataLoader(dataset, batch_size=BATCH)
    # seed
    validation_dataloader = accelerator.prepare(validation_dataloader)

    for inputs, targets in validation_dataloader:
        predictions = model(inputs)
        # Gather all predictions and targets
        all_predictions, all_targets = accelerator.gather_for_metrics((predictions, targets))
        # Example of use with a *Datasets.Metric*
        metric.add_batch(all_predictions, all_targets)

    inputs, targets = dataset.tensors
    assert metric.targets == targets.tolist()
    expected = model(inputs.to(accelerator.device)).cpu()
    torch.testing.assert_close(torch.tensor(metric.predictions), expected, rtol=1e-5, atol=1e-6)


@dataclass
class TinyConfig:
    width: int = 16
    layers: int = 3


class Block(nn.Module):
    """A block with a residual connection, which must not be split."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.linear = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


class TinyLanguageModel(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.letters = nn.Embedding(32, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = nn.Linear(config.width, 32)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        x = self.letters(letters)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@seed("002-init_empty_weights", 1)
def empty_weights(folder: Path) -> None:
    # seed
    from accelerate_core import init_empty_weights

    config = TinyConfig()
    with init_empty_weights():
        model = TinyLanguageModel(config)

    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert next(TinyLanguageModel(config).parameters()).device.type == "cpu"


@seed("002-load_checkpoint_and_dispatch", 1)
def load_and_dispatch(folder: Path) -> None:
    from accelerate_core import init_empty_weights

    original = TinyLanguageModel(TinyConfig()).eval()
    accelerator = Accelerator()
    accelerator.save_model(original, folder / "whole")
    accelerator.save_model(original, folder / "shards", max_shard_size="2KB")
    assert len(list((folder / "shards").glob("*.safetensors"))) > 1
    letters = torch.arange(12).view(2, 6)
    for checkpoint in (folder / "whole", folder / "shards"):
        with init_empty_weights():
            model = TinyLanguageModel(TinyConfig())
        # seed
        from accelerate_core import load_checkpoint_and_dispatch

        model = load_checkpoint_and_dispatch(
            model, checkpoint=checkpoint, device_map="auto", no_split_module_classes=["Block"]
        )

        torch.testing.assert_close(model(letters).cpu(), original(letters))


class MyDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sequences of 5 vectors, each with a target of probabilities."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        source, target = torch.randn(2, 5, 16, generator=generator)
        return source, target.softmax(0)


def load_dataset(name: str) -> MyDataset:
    return MyDataset()


def transformer() -> nn.Transformer:
    set_seed(3)
    return nn.Transformer(16, 2, 1, 1, dim_feedforward=32)


def assert_readme_trained(accelerator: Accelerator, model: nn.Module, losses: list[Any]) -> None:
    per_epoch = torch.tensor(losses).view(10, -1).mean(1)
    assert len(losses) == 10 * 8 // accelerator.num_processes
    assert per_epoch[-1] < per_epoch[0]
    assert same_everywhere(accelerator, weights(model))


@seed("003-five lines")
def readme_five_lines(folder: Path) -> None:
    losses = []
    # seed
    accelerator = Accelerator()
    device = accelerator.device

    model = transformer().to(device)
    optimizer = torch.optim.Adam(model.parameters())

    dataset = load_dataset("my_dataset")
    data = torch.utils.data.DataLoader(dataset, shuffle=True)

    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    model.train()
    for _epoch in range(10):
        for source, targets in data:
            source = source.to(device)
            targets = targets.to(device)

            optimizer.zero_grad()

            output = model(source, source)
            loss = F.cross_entropy(output, targets)

            accelerator.backward(loss)

            optimizer.step()
            losses.append(loss.item())

    assert_readme_trained(accelerator, model, losses)


@seed("003-without device placement")
def readme_without_placement(folder: Path) -> None:
    losses = []
    # seed
    accelerator = Accelerator()

    model = transformer()
    optimizer = torch.optim.Adam(model.parameters())

    dataset = load_dataset("my_dataset")
    data = torch.utils.data.DataLoader(dataset, shuffle=True)

    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    model.train()
    for _epoch in range(10):
        for source, targets in data:
            optimizer.zero_grad()

            output = model(source, source)
            loss = F.cross_entropy(output, targets)

            accelerator.backward(loss)

            optimizer.step()
            losses.append(loss.item())

    assert_readme_trained(accelerator, model, losses)


class Pretrained(MyModel):
    """A model with `save_pretrained`, as in the README."""

    def save_pretrained(
        self,
        save_directory: str,
        save_function: Callable[..., None] = torch.save,
        state_dict: dict[str, torch.Tensor] | None = None,
    ) -> None:
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        weights = self.state_dict() if state_dict is None else state_dict
        save_function(weights, str(Path(save_directory, "weights.bin")))


@seed("003-save_pretrained")
def save_pretrained(folder: Path) -> None:
    save_dir = str(folder / "pretrained")
    set_seed(3)
    accelerator = Accelerator()
    model = accelerator.prepare(Pretrained())
    # seed: How to save your Transformer?
    accelerator.wait_for_everyone()
    unwrapped_model = accelerator.unwrap_model(model)
    unwrapped_model.save_pretrained(
        save_dir,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )

    accelerator.wait_for_everyone()
    saved = torch.load(Path(save_dir, "weights.bin"), weights_only=True, map_location="cpu")
    fresh = Pretrained()
    fresh.load_state_dict(saved)
    assert torch.equal(weights(fresh), weights(model))
