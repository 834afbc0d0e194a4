"""Tests of `load_and_quantize_model` that Accelerate can't run on a CPU. They need bitsandbytes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from accelerate.utils import (
    BnbQuantizationConfig,
    load_and_quantize_model,
    set_module_tensor_to_device,
)
from accelerate.utils.bnb import get_quantized_model_device_map, replace_with_bnb_layers
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from safetensors.torch import load_file, save_file
from torch import nn

from accelerate_core.errors import CheckpointError, ConfigurationError

WIDTH = 64
IDS = torch.arange(32).reshape(2, 16)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x.to(self.norm.weight.dtype)).to(x.dtype)
        return x + self.down(torch.relu(self.up(y)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def whole() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def checkpoint(whole: Net, tmp_path: Path) -> Path:
    state = {name: one for name, one in whole.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path / "model.safetensors"


def empty() -> Net:
    with init_empty_weights():
        return Net().eval()


def outputs_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        first, again = model(IDS), model(IDS)
    assert torch.equal(first, again)
    return first


def relative_error(found: torch.Tensor, whole: nn.Module) -> float:
    """Return the relative difference of a result from that of the original weights."""
    plain = outputs_of(whole)
    return float((found.float() - plain).norm() / plain.norm())


EIGHT: dict[str, Any] = {"load_in_8bit": True, "torch_dtype": "fp32"}
FOUR: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp32"}
BOTH = pytest.mark.parametrize("how", [EIGHT, FOUR], ids=["8", "4"])


def loaded(how: dict[str, Any], checkpoint: Path | None, **more: Any) -> nn.Module:
    return load_and_quantize_model(empty(), BnbQuantizationConfig(**how), checkpoint, **more)


@BOTH
def test_every_way_to_load_has_the_same_result(
    how: dict[str, Any], whole: Net, checkpoint: Path
) -> None:
    config = BnbQuantizationConfig(**how)
    before = copy.deepcopy(config)
    expected = outputs_of(loaded(how, checkpoint))
    assert 0 < relative_error(expected, whole) < 0.1
    for place in ("auto", "balanced_low_0", "sequential", {"": "cpu"}, {"": torch.device("cpu")}):
        made = load_and_quantize_model(empty(), config, checkpoint, device_map=place)
        assert torch.equal(outputs_of(made), expected)
        assert made.head.weight is made.embed.weight
    assert config == before
    mine = load_and_quantize_model(whole, config)
    assert torch.equal(outputs_of(mine), expected)
    assert mine is whole
    assert whole.head.weight is whole.embed.weight
    assert isinstance(whole.blocks[0].up, Linear8bitLt if config.load_in_8bit else Linear4bit)
    assert not whole.blocks[0].up.training


@pytest.mark.parametrize("given", [False, True])
def test_skipped_modules_keep_their_dtype(given: bool, whole: Net, checkpoint: Path) -> None:
    config = BnbQuantizationConfig(
        load_in_8bit=True, skip_modules=["head", "blocks.1"], keep_in_fp32_modules=["norm", "embed"]
    )
    model = whole if given else empty()
    made = load_and_quantize_model(model, config, None if given else checkpoint)
    assert made.head.weight.dtype == made.embed.weight.dtype == torch.float32
    assert made.blocks[0].norm.weight.dtype == torch.float32
    assert made.blocks[0].up.bias.dtype == made.blocks[1].up.weight.dtype == torch.float16
    assert made.blocks[0].up.weight.dtype == torch.int8


@BOTH
def test_modules_that_are_not_quantized_can_be_on_disk(
    how: dict[str, Any], whole: Net, checkpoint: Path, tmp_path: Path
) -> None:
    place = {"embed": "cpu", "head": "cpu", **{f"blocks.{at}": "cpu" for at in range(3)}}
    place["blocks.1"] = "disk"
    skip = {"skip_modules": ["head", "blocks.1"]} if "load_in_8bit" in how else {}
    made = loaded({**how, **skip}, checkpoint, device_map=place)
    assert made.blocks[1].up.weight.is_meta
    assert type(made.blocks[1].up) is nn.Linear
    assert type(made.blocks[2].up) is not nn.Linear
    assert relative_error(outputs_of(made), whole) < 0.1
    half = {**how, "torch_dtype": "bf16", **skip}
    folder = tmp_path / "off"
    made = loaded(half, checkpoint, device_map=place, offload_folder=folder)
    assert relative_error(outputs_of(made), whole) < 0.1
    assert (folder / "blocks.1.up.weight.dat").exists()


def test_impossible_settings_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    away = {"embed": "cpu", "head": "cpu", "blocks": "disk"}
    with pytest.raises(ConfigurationError, match=r"'blocks.0.up.weight' on 'disk'.*skip_modules"):
        loaded(EIGHT, checkpoint, device_map=away)
    for how in (EIGHT, FOUR):
        with pytest.raises(ConfigurationError, match=r"cannot be offloaded.*max_memory"):
            loaded(how, checkpoint, device_map="auto", max_memory={"cpu": "12KB"})
        with pytest.raises(ConfigurationError, match="on 'disk'"):
            loaded(how, checkpoint, device_map={"": "disk"})
        with pytest.raises(ConfigurationError, match=r"strategy.*'auto'"):
            loaded(how, checkpoint, device_map="autos")
        with pytest.raises(ConfigurationError, match=r"such as 'embed.weight'.*weights_location"):
            loaded(how, None)
    # With an accelerator in the map, quantized parts on the CPU would be offloaded, too.
    model = replace_with_bnb_layers(empty(), BnbQuantizationConfig(**EIGHT), ["head"])
    with pytest.raises(ConfigurationError, match=r"'blocks.0.up.weight' on 'cpu'"):
        get_quantized_model_device_map(
            model, BnbQuantizationConfig(**EIGHT), {"": "cuda:0", "blocks": "cpu"}
        )


@pytest.mark.parametrize("used", [False, True])
def test_weights_saved_in_8_bits_are_loaded(
    used: bool, checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded(EIGHT, checkpoint)
    if used:
        outputs_of(model)
    state = {name: one for name, one in model.state_dict().items() if name != "head.weight"}
    place = tmp_path / "eight" / "model.safetensors"
    place.parent.mkdir()
    save_file(state, place)
    again = loaded(EIGHT, place)
    assert torch.equal(outputs_of(again), outputs_of(model))
    assert "which were not used" not in caplog.text
    assert again.state_dict().keys() == model.state_dict().keys()
    half = loaded({"load_in_8bit": True}, place)
    assert half.blocks[0].up.weight.SCB.dtype == torch.float32
    state = {name: one for name, one in load_file(place).items() if not name.endswith("SCB")}
    save_file(state, place)
    with pytest.raises(
        CheckpointError, match=r"blocks.0.up.weight in 8 bits without blocks.0.up.SCB"
    ):
        loaded(EIGHT, place)


def test_linear_layers_are_replaced_except_skipped_names() -> None:
    config = BnbQuantizationConfig(load_in_4bit=True)
    attention = nn.MultiheadAttention(WIDTH, 2)
    with pytest.warns(UserWarning, match="no linear layer"):
        assert replace_with_bnb_layers(attention, config) is attention
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    replace_with_bnb_layers(inner, config, ["outer.1"], ["outer"])
    assert [type(one) for one in inner] == [Linear4bit, nn.Linear]
    weight = inner[1].weight.detach().clone()
    layer = replace_with_bnb_layers(inner, config)[1]
    set_module_tensor_to_device(inner, "1.weight", "cpu", weight)
    assert layer.weight.dtype == torch.uint8
    assert layer.quant_state is layer.weight.quant_state
