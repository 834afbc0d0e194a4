"""`estimate-memory` uses only shapes, and its results equal the memory that torch uses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

from accelerate_big_model.estimate import by_backend, largest_layer, shapes_of
from accelerate_launch.cli import cli


@pytest.fixture
def model() -> nn.Module:
    blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
    return nn.ModuleDict({"blocks": blocks, "head": nn.Linear(16, 10)})


def estimate(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["estimate-memory", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    made = json.loads(result.output)
    assert isinstance(made, dict)
    return made


def test_training_estimate_equals_the_memory_of_torch(model: nn.Module, tmp_path: Path) -> None:
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    rows = {row["dtype"]: row for row in estimate(str(tmp_path))["dtypes"]}
    optimizer = torch.optim.AdamW(model.parameters())
    sum(p.square().sum() for p in model.parameters()).backward()
    optimizer.step()
    weights = sum(p.nbytes for p in model.parameters())
    states = sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if value.dim() > 0
    )
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    got = rows["float32"]
    assert (got["weights"], got["gradients"], got["optimizer"]) == (weights, gradients, states)
    assert got["training"] == weights + gradients + states
    assert rows["bfloat16"]["training"] * 2 == got["training"]
    assert (rows["int4"]["weights"] * 8, rows["int4"]["training"]) == (weights, None)


def test_largest_layer_is_a_block_or_a_module(model: nn.Module) -> None:
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert largest_layer(sizes) == ("blocks.0", 16 * 16 + 16)
    assert largest_layer({"embed.weight": 9, "head.weight": 4, "head.bias": 4}) == ("embed", 9)


def test_estimates_use_what_each_backend_shards(model: nn.Module) -> None:
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    rows = {
        row["backend"]: row["bytes"] for row in by_backend(sizes, ["float32"], "adamw", [1, 4], {})
    }
    whole = 4 * 4 * sum(sizes.values())
    assert rows["ddp"] == {"1": whole, "4": whole}
    assert rows["fsdp2"]["1"] == whole
    assert abs(rows["fsdp2"]["4"] - (whole / 4 + 4 * (16 * 16 + 16))) < 4


def test_torch_checkpoints_and_configs_are_estimated(model: nn.Module, tmp_path: Path) -> None:
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    count = sum(p.numel() for p in model.parameters())
    assert sum(shapes_of(str(tmp_path / "pytorch_model.bin")).values()) == count
    folder = tmp_path / "config"
    folder.mkdir()
    config = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 50}
    (folder / "config.json").write_text(json.dumps(config))
    assert shapes_of(str(folder))["embeddings.word_embeddings.weight"] == 50 * 16
    png = tmp_path / "bars.png"
    arguments = [str(tmp_path), "--dtypes", "float32", "float16", "--png", str(png)]
    output = CliRunner().invoke(cli, ["estimate-memory", *arguments]).output
    assert f"{count:,} parameters" in output
    assert "float16" in output
    assert "█" in output
    assert png.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere/at/all.bin"], "There is no file or folder"),
        (["made.txt"], "is not a checkpoint. Pass a"),
        (["broken.safetensors"], "is not a safetensors file"),
        (["broken.bin"], "is not a torch checkpoint"),
        (["."], "neither weights"),
        (["good.safetensors", "--dtypes", "float31"], "Did you mean 'float32'?"),
        (["good.safetensors", "--optimizer", "sdg"], "Did you mean 'sgd'?"),
        (["good.safetensors", "--world_sizes", "two"], "must be positive numbers"),
    ],
)
def test_invalid_models_and_options_are_refused(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if arguments[0] != ".":
        for name in ("made.txt", "broken.safetensors", "broken.bin"):
            Path(name).write_text("nothing of the kind")
        save_file({"a": torch.zeros(2)}, "good.safetensors")
    result = CliRunner().invoke(cli, ["estimate-memory", *arguments])
    assert result.exit_code == 2
    assert said in result.output


def test_unknown_model_name_is_an_error_when_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = CliRunner().invoke(cli, ["estimate-memory", "nobody/nothing-of-this-name"])
    assert result.exit_code == 2
    assert "Hub" in result.output


def test_png_without_matplotlib_is_refused_before_anything_is_printed(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(model.state_dict(), tmp_path / "weights.bin")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = ["estimate-memory", str(tmp_path / "weights.bin"), "--png", "bars.png"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2
    assert "pip install matplotlib" in result.output
    assert "parameters" not in result.output


def test_device_map_is_shown_with_its_reasons(tmp_path: Path) -> None:
    sizes = {f"layers.{at}.weight": 1000 for at in (0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9)}
    tensors = {name: torch.zeros(count) for name, count in sizes.items()}
    save_file({"embed": torch.zeros(500), **tensors}, tmp_path / "model.safetensors")
    arguments = [str(tmp_path / "model.safetensors"), "--device_map", "sequential"]
    limits = ["--max_memory", "0=11KB,cpu=30KB"]
    shown = CliRunner().invoke(cli, ["estimate-memory", *arguments, *limits])
    assert shown.exit_code == 0, shown.output
    rows = {row.split()[0]: row for row in shown.output.splitlines() if "iB" in row or " B" in row}
    assert "embed, layers.0" in rows["0"]
    assert "layers.1-6" in rows["cpu"]
    assert "layers.7-11" in rows["disk"]
    assert "█" in rows["cpu"]
    assert "0 is full: layers.1 needs 4000 bytes" in shown.output
    told = json.loads(
        CliRunner().invoke(cli, ["estimate-memory", *arguments, *limits, "--json"]).output
    )
    assert told["device_map"]["layers.11"] == "disk"
    assert sum(row["bytes"] for row in told["devices"]) == 12 * 4000 + 2000
    wrong = CliRunner().invoke(cli, ["estimate-memory", arguments[0], *limits])
    assert "can only be used with --device_map" in wrong.output
