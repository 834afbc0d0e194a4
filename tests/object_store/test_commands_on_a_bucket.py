"""`accelerate-core checkpoints` and `merge-weights` take the URLs that a script takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from s3_server import SECRET, s3_client
from safetensors.torch import load_file
from torch import nn

from accelerate_core import Accelerator
from accelerate_core.utils import ProjectConfiguration
from accelerate_launch.cli import cli

URL = "s3://tests/run"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(one) for one in arguments])


def rows(command: str, url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(call("checkpoints", command, url, "--json").stdout)
    return found


@pytest.fixture(scope="module")
def weights(s3: object) -> dict[str, torch.Tensor]:
    """Save two numbered checkpoints, a named one and exported weights; return the weights."""
    config = ProjectConfiguration(URL, automatic_checkpoint_naming=True)
    with Accelerator(cpu=True, project_config=config) as accelerator:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        net, _ = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
        accelerator.save_state()
        accelerator.save_state(max_shard_size=300)
        accelerator.save_model(net, "exported", max_shard_size=300)
    with Accelerator(cpu=True, project_dir=URL) as accelerator:
        accelerator.prepare(nn.Linear(2, 2))
        accelerator.save_state("best")
    return dict(net.state_dict())


def key_of(name: str) -> str:
    listed = s3_client().list_objects_v2(Bucket="tests", Prefix="run/checkpoints/checkpoint_0/")
    (key,) = [one["Key"] for one in listed["Contents"] if one["Key"].endswith(name)]
    return str(key)


@pytest.mark.usefixtures("weights")
def test_list_verify_and_show_find_what_was_saved() -> None:
    paths = [f"{URL}/best", *(f"{URL}/checkpoints/checkpoint_{number}" for number in (0, 1))]
    listed = rows("list", URL)
    assert [(row["path"], row["state"]) for row in listed] == [(path, "whole") for path in paths]
    assert all(row["bytes"] > 0 and row["world_size"] == 1 for row in listed)
    assert [row["path"] for row in rows("list", paths[1])] == paths[1:2]
    assert [row["path"] for row in rows("list", f"{URL}/checkpoints/")] == paths[1:]
    verified = call("checkpoints", "verify", URL)
    assert verified.exit_code == 0, verified.output
    assert f"{paths[2]}: whole" in verified.stdout
    shown = json.loads(call("checkpoints", "show", URL, "--json").stdout)
    assert shown["path"] == paths[2]
    assert "model.safetensors.index.json" in shown["files"]
    assert "checkpoint_1" in call("checkpoints", "list", URL).stdout


@pytest.mark.usefixtures("weights")
def test_damaged_objects_are_named() -> None:
    key = key_of("model.safetensors")
    client = s3_client()
    whole = client.get_object(Bucket="tests", Key=key)["Body"].read()
    changed = whole[:-1] + bytes([whole[-1] ^ 1])
    client.put_object(Bucket="tests", Key=key, Body=changed)
    try:
        assert [row["state"] for row in rows("list", f"{URL}/checkpoints")] == ["whole"] * 2
        done = call("checkpoints", "verify", f"{URL}/checkpoints")
        assert done.exit_code == 1
        assert f"s3://tests/{key} is damaged: its checksum" in done.stdout
        client.put_object(Bucket="tests", Key=key, Body=changed[:-8])
        (row,) = rows("list", f"{URL}/checkpoints/checkpoint_0")
        assert row["state"] == "damaged"
        assert f"s3://tests/{key} has {len(whole) - 8} bytes" in row["why"]
        client.delete_object(Bucket="tests", Key=key)
        (row,) = rows("verify", f"{URL}/checkpoints/checkpoint_0")
        assert row["problems"] == [f"s3://tests/{key} is missing."]
    finally:
        client.put_object(Bucket="tests", Key=key, Body=whole)


@pytest.mark.parametrize(
    "source", ["checkpoints/checkpoint_0", "checkpoints/checkpoint_1", "exported"]
)
def test_merge_weights_downloads_and_merges_them(
    weights: dict[str, torch.Tensor], source: str, tmp_path: Path
) -> None:
    done = call("merge-weights", f"{URL}/{source}", tmp_path / "out")
    assert done.exit_code == 0, done.output
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert merged.keys() == weights.keys()
    assert all(torch.equal(merged[name], weights[name]) for name in weights)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # no downloaded files are left
    (tmp_path / "out" / "manifest.json").touch()
    refused = call("merge-weights", f"{URL}/{source}", tmp_path / "out")
    assert refused.exit_code == 2
    assert "is itself a checkpoint" in refused.output


@pytest.mark.usefixtures("s3")
def test_merge_weights_deletes_a_checkpoint_only_if_asked_and_after_merging(tmp_path: Path) -> None:
    url = "s3://tests/to-delete/state"
    with Accelerator(cpu=True, project_dir="s3://tests/to-delete") as accelerator:
        accelerator.prepare(nn.Linear(2, 2))
        accelerator.save_state("state")
    (tmp_path / "file").touch()
    blocked = call("merge-weights", url, tmp_path / "file" / "out", "--remove_checkpoint_dir")
    assert blocked.exit_code == 2
    assert f"{url} cannot be merged into {tmp_path / 'file' / 'out'}" in blocked.output
    assert call("merge-weights", url, tmp_path / "out").exit_code == 0
    assert len(rows("list", url)) == 1
    assert call("merge-weights", url, tmp_path / "out", "--remove_checkpoint_dir").exit_code == 0
    assert "There is no checkpoint in" in call("checkpoints", "list", url).output


@pytest.mark.usefixtures("s3")
def test_errors_name_what_is_missing_and_hold_no_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Accelerator(cpu=True, project_dir="s3://tests/empty") as accelerator:
        accelerator.save_state("state")  # without a model
    for words, told in (
        (("checkpoints", "list", "s3://tests/nothing"), "no checkpoint in s3://tests/nothing"),
        (("checkpoints", "list", "s3://no-such-bucket/run"), "s3://no-such-bucket"),
        (("checkpoints", "list", "ftp://host/run"), "no store for ftp://"),
        (("checkpoints", "list", tmp_path / "nothing"), f"no directory {tmp_path / 'nothing'}"),
        (("merge-weights", "s3://tests/nothing", tmp_path / "out"), "There are no weights at"),
        (
            ("merge-weights", "s3://tests/empty/state", tmp_path / "out"),
            "s3://tests/empty/state must",
        ),
    ):
        done = call(*words)
        assert done.exit_code == 2, done.output
        assert told in " ".join(done.output.split()), done.output
        assert SECRET not in done.output
    monkeypatch.setenv("ACCELERATE_CHECKPOINTER", "directory")
    refused = call("checkpoints", "list", URL)
    assert refused.exit_code == 2
    assert "the checkpointer 'directory' writes to local disks" in refused.output
