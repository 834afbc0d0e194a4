"""Tests of checkpoints with weights that bitsandbytes quantized. They need bitsandbytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from safetensors.torch import load_file
from torch import nn

from accelerate_core import Accelerator, load_checkpoint_in_model
from accelerate_core.errors import CheckpointError

WIDTH = 128
X = torch.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH)
FOUR: dict[str, Any] = {"compress_statistics": False, "quant_type": "nf4"}
KINDS: dict[str, dict[str, Any]] = {
    "nf4": FOUR,
    "nested": FOUR | {"compress_statistics": True},
    "bf16_storage": FOUR | {"quant_storage": torch.bfloat16},
    "fp4": FOUR | {"quant_type": "fp4"},
    "int8": {},
}


class Net(nn.Module):
    """A quantized layer, the layer that is trained, and another quantized layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()

        def layer() -> nn.Module:
            if kind == "int8":
                return Linear8bitLt(WIDTH, WIDTH, bias=False, has_fp16_weights=False)
            return Linear4bit(WIDTH, WIDTH, bias=False, **KINDS[kind])

        self.first, self.adapter, self.last = layer(), nn.Linear(WIDTH, WIDTH), layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.adapter(self.first(x)))


class Run:
    def __init__(self, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        net = Net(kind).to("cpu")  # quantizes
        optimizer = torch.optim.AdamW(net.adapter.parameters(), lr=1e-2)
        self.accelerator = Accelerator(cpu=True)
        self.model, self.optimizer = self.accelerator.prepare(net, optimizer)

    def losses(self, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            loss = self.model(X).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            found.append(loss.item())
        return found

    def state(self) -> dict[str, torch.Tensor]:
        return {name: one.clone() for name, one in self.model.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(bits(value), bits(other[name])) for name, value in one.items())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)  # packed weights may be NaN as bf16


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_run_on_another_base_model_resumes_bit_for_bit(
    kind: str, safe: bool, tmp_path: Path
) -> None:
    run = Run(kind, seed=0)
    run.losses(3)
    run.accelerator.save_state(tmp_path, safe_serialization=safe)
    saved = run.state()
    expected = run.losses(3)
    for steps in (0, 2):  # int8 scales move in the first forward
        resumed = Run(kind, seed=1)
        resumed.losses(steps)
        assert not equal(resumed.state(), saved)
        resumed.accelerator.load_state(tmp_path)
        assert equal(resumed.state(), saved)
        assert resumed.losses(3) == expected


@pytest.mark.parametrize("kind", ["nf4", "nested"])
def test_model_that_was_evaluated_is_saved_as_it_trains(kind: str, tmp_path: Path) -> None:
    run = Run(kind, seed=0)
    run.losses(1)
    run.accelerator.save_state(tmp_path / "first")
    run.model.eval()
    with torch.no_grad():
        run.model(X)  # repacks the weights on CPUs with AVX512-BF16
    run.accelerator.save_state(tmp_path / "second")
    run.model.train()
    saved = run.losses(2)
    other = Run(kind, seed=1)
    other.accelerator.load_state(tmp_path / "second")
    assert other.losses(2) == saved
    run.model.eval()
    with torch.no_grad():
        run.model(X)
    run.accelerator.load_state(tmp_path / "second")
    run.model.train()
    assert run.losses(2) == saved
    other.accelerator.load_state(tmp_path / "first")
    assert saved == pytest.approx(other.losses(2), rel=0.02)


def test_checkpoint_of_another_quantization_is_refused(tmp_path: Path) -> None:
    run = Run("nf4", seed=0)
    run.accelerator.save_state(tmp_path)
    before = run.state()
    for kind, wrong in (("fp4", "quant_state.bitsandbytes__fp4 is not in"), ("nested", "absmax")):
        with pytest.raises(CheckpointError, match=wrong):
            Run(kind, seed=1).accelerator.load_state(tmp_path)
    with pytest.raises(CheckpointError, match=r"first\.weight"):
        Run("int8", seed=1).accelerator.load_state(tmp_path)
    assert equal(run.state(), before)


def test_whole_model_refuses_packed_weights(tmp_path: Path) -> None:
    Run("nf4", seed=0).accelerator.save_state(tmp_path)
    accelerator = Accelerator(cpu=True)
    plain = nn.ModuleDict(
        {name: nn.Linear(WIDTH, WIDTH, name == "adapter") for name in ("first", "adapter", "last")}
    )
    accelerator.prepare(plain)
    with pytest.raises(CheckpointError, match=r"first\.weight"):
        accelerator.load_state(tmp_path)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_save_model_writes_scales_that_are_not_loaded_without_them(
    kind: str, tmp_path: Path
) -> None:
    run = Run(kind, seed=0)
    run.accelerator.save_model(run.model, tmp_path)
    assert equal(load_file(tmp_path / "model.safetensors"), run.state())
    other = Run(kind, seed=1)
    with pytest.raises(CheckpointError, match="that bitsandbytes quantized"):
        load_checkpoint_in_model(other.model, tmp_path)
