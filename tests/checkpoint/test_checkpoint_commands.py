"""`accelerate-core checkpoints` and `merge-weights`, on real directories."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn

from accelerate_core import Accelerator
from accelerate_core.utils import ProjectConfiguration
from accelerate_launch.cli import cli


def call(*arguments: object) -> Any:
    return CliRunner().invoke(cli, [str(one) for one in arguments])


@pytest.fixture
def project(tmp_path: Path) -> Path:
    config = ProjectConfiguration(str(tmp_path / "run"), automatic_checkpoint_naming=True)
    with Accelerator(cpu=True, project_config=config) as accelerator:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        accelerator.save_state()
        accelerator.save_state(max_shard_size=300)
    return tmp_path / "run"


def test_list_and_verify_report_damaged_checkpoints(project: Path) -> None:
    rows = json.loads(call("checkpoints", "list", project, "--json").stdout)
    assert [(Path(row["path"]).name, row["state"]) for row in rows] == [
        ("checkpoint_0", "whole"),
        ("checkpoint_1", "whole"),
    ]
    assert call("checkpoints", "verify", project).exit_code == 0
    weights = project / "checkpoints" / "checkpoint_0" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    verified = call("checkpoints", "verify", project)
    assert verified.exit_code == 1
    assert f"{weights} is damaged" in verified.stdout
    rows = json.loads(call("checkpoints", "verify", project, "--json").stdout)
    assert [row["state"] for row in rows] == ["damaged", "whole"]
    weights.unlink()
    listed = call("checkpoints", "list", project)
    assert "damaged" in listed.stdout
    assert "model.safetensors is missing" in listed.stdout
    (project / "checkpoints" / "checkpoint_1" / "manifest.json").unlink()
    shutil.copytree(project / "checkpoints" / "checkpoint_0", project / "best")
    rows = json.loads(call("checkpoints", "list", project, "--json").stdout)
    assert [(Path(row["path"]).name, row["state"]) for row in rows] == [
        ("best", "damaged"),
        ("checkpoint_0", "damaged"),
        ("checkpoint_1", "damaged"),
    ]
    # Hidden directories are left out, unless they are named.
    shutil.copytree(project / "best", project / ".best")
    assert len(json.loads(call("checkpoints", "list", project, "--json").stdout)) == 3
    assert len(json.loads(call("checkpoints", "list", project / ".best", "--json").stdout)) == 1
    alone = call("checkpoints", "verify", project / "checkpoints" / "checkpoint_1")
    assert alone.exit_code == 1
    assert "manifest.json" in alone.stdout
    (project / "empty").mkdir()
    empty = call("checkpoints", "list", project / "empty")
    assert empty.exit_code == 2
    assert "There is no checkpoint in" in empty.output


def test_show_prints_the_newest_checkpoint(project: Path) -> None:
    shown = json.loads(call("checkpoints", "show", project, "--json").stdout)
    assert shown["path"].endswith("checkpoint_1")
    assert shown["world_size"] == 1
    text = call("checkpoints", "show", project / "checkpoints" / "checkpoint_0").stdout
    assert "model.safetensors" in text
    assert "accelerate-core" in text


def test_merge_weights_merges_shards(project: Path, tmp_path: Path) -> None:
    whole = load_file(project / "checkpoints" / "checkpoint_0" / "model.safetensors")
    sharded = project / "checkpoints" / "checkpoint_1"
    for flags, name in (
        ([], "model.safetensors"),
        (["--unsafe_serialization"], "pytorch_model.bin"),
    ):
        done = call("merge-weights", sharded, tmp_path / "out", *flags)
        assert done.exit_code == 0, done.output
        path = tmp_path / "out" / name
        merged = load_file(path) if name.endswith("safetensors") else torch.load(path)
        assert merged.keys() == whole.keys()
        assert all(torch.equal(merged[key], whole[key]) for key in whole)
    for place in (sharded, project / "checkpoints" / "checkpoint_0"):
        refused = call("merge-weights", sharded, place)
        assert refused.exit_code == 2
        assert "is itself a checkpoint" in refused.output
    refused = call("merge-weights", sharded, sharded / "in", "--remove_checkpoint_dir")
    assert refused.exit_code == 2
    assert "is inside" in refused.output
    assert (
        call("merge-weights", sharded, tmp_path / "out", "--remove_checkpoint_dir").exit_code == 0
    )
    assert not sharded.exists()


def test_merging_a_distributed_checkpoint_executes_no_pickled_code(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    state = {"model": {"a": torch.randn(5, 3), "b": torch.arange(4)}}
    dcp.save(state, checkpoint_id=tmp_path / "ckpt" / "pytorch_model_fsdp_0", no_dist=True)
    done = call("merge-weights", tmp_path / "ckpt", tmp_path / "out")
    assert done.exit_code == 0, done.output
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert merged.keys() == {"a", "b"}
    assert torch.equal(merged["a"], state["model"]["a"])

    class Planted:
        def __reduce__(self) -> Any:
            return Path.touch, (Path("planted"),)

    metadata = tmp_path / "ckpt" / "pytorch_model_fsdp_0" / ".metadata"
    metadata.write_bytes(pickle.dumps(Planted()))
    refused = call("merge-weights", tmp_path / "ckpt", tmp_path / "out")
    assert refused.exit_code == 2
    assert ".metadata" in refused.output
    assert not Path("planted").exists()
