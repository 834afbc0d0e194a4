"""Weights stored in fp16 under a gradient scaler, which torch refuses after the first backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate_core import Accelerator, GradScalerKwargs
from accelerate_core.errors import ConfigurationError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(indices))


def half_words(frozen: bool = False) -> Net:
    net = Net()
    net.words.half().requires_grad_(not frozen)
    return net


def sgd(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, **options)


@pytest.mark.parametrize("net", [Net().half(), half_words()], ids=["model", "embedding"])
def test_trainable_fp16_weights_are_refused_in_prepare(net):
    with (
        Accelerator(cpu=True, mixed_precision="fp16") as accelerator,
        pytest.raises(ConfigurationError) as caught,
    ):
        accelerator.prepare(net, sgd(net))
    for part in (
        "'words.weight'",
        "torch.float16",
        "model.float()",
        "requires_grad_(False)",
        "bf16",
    ):
        assert part in str(caught.value)


def test_optimizer_that_is_prepared_after_the_model_is_refused():
    with Accelerator(cpu=True, mixed_precision="fp16") as accelerator:
        net = accelerator.prepare(Net().half())  # enough for inference
        with pytest.raises(ConfigurationError, match=r"'words\.weight'"):
            accelerator.prepare(sgd(net))


def test_fp16_weights_that_are_unfrozen_later_are_refused():
    with Accelerator(cpu=True, mixed_precision="fp16") as accelerator:
        net = half_words(frozen=True)
        net, optimizer = accelerator.prepare(net, sgd(net))
        accelerator.backward(net(torch.arange(4)).square().mean())
        optimizer.step()
        net.words.requires_grad_(True)
        with pytest.raises(ConfigurationError, match=r"'words\.weight'"):
            accelerator.backward(net(torch.arange(4)).square().mean())


@pytest.mark.parametrize(
    ("net", "options"),
    [
        (half_words(frozen=True), {"mixed_precision": "fp16"}),
        (Net().bfloat16(), {"mixed_precision": "bf16"}),
        (Net().half(), {"mixed_precision": "no"}),
        (
            Net().half(),
            {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(enabled=False)]},
        ),
    ],
    ids=["frozen", "bf16", "without mixed precision", "without scaler"],
)
def test_weights_that_can_be_trained_are_accepted(net, options):
    with Accelerator(cpu=True, **options) as accelerator:
        model, optimizer = accelerator.prepare(net, sgd(net))
        accelerator.backward(model(torch.arange(4)).float().square().mean())
        optimizer.step()
