"""Messages between ranks through the store of the process group, which anyone on the network can write."""

from __future__ import annotations

import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from accelerate_checkpoint import collect as module
from accelerate_checkpoint.draft import Report
from accelerate_checkpoint.files import FileEntry
from accelerate_checkpoint.sharded_save import write_metadata
from accelerate_core.plugin import CheckpointError


class Planted:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture
def collect(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Collect the values of two ranks; an attacker has written the second one."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)

    def run(message: bytes) -> list[Any]:
        name = f"test{len(message)}"
        prefixed = dist.PrefixStore(f"accelerate/collect/{name}", store)
        prefixed.set("0/1", message)
        prefixed.add("0/arrived", 1)
        return module.collect(name, ["own"], [0, 1])

    return run


def test_values_arrive_as_json(collect: Any) -> None:
    assert collect(zlib.compress(b'[1, "a"]')) == [["own"], [1, "a"]]


@pytest.mark.parametrize("packed", [False, True])
def test_planted_pickle_is_not_executed(collect: Any, tmp_path: Path, packed: bool) -> None:
    planted = pickle.dumps(Planted(tmp_path / "executed"))
    with pytest.raises(CheckpointError, match="of rank 1 in the store"):
        collect(zlib.compress(planted) if packed else planted)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("text", [b"[" * 100_000, b" " * 2000, b"\xff"])
def test_message_that_is_too_large_or_not_json_is_refused(
    collect: Any, monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    monkeypatch.setattr(module, "_LARGEST", 1000 if text.isspace() else 1 << 20)
    with pytest.raises(CheckpointError, match="cannot be read"):
        collect(zlib.compress(text))


@pytest.mark.parametrize(
    "content",
    [None, 3, [], [[["../x", 1, "a"]], 0], [[["/x", 1, "a"]], 0], [[["x", "many", "a"]], 0], [[["x"]], 0]],
)  # fmt: skip
def test_invalid_report_is_refused(content: Any) -> None:
    with pytest.raises(CheckpointError, match="invalid list of files"):
        Report.from_json(content)


def test_report_survives_the_way() -> None:
    report = Report({"a/b": FileEntry(3, "00ff")}, 4)
    assert Report.from_json(report.as_json()) == report


@pytest.mark.parametrize(
    "shard",
    [[], ["w"], ["w", [2], [0], [2], "load", "f", 0, 8], ["w", [2], [0], [2], "float32", "../f", 0, 8], 7],
)  # fmt: skip
def test_invalid_shards_are_refused(tmp_path: Path, shard: Any) -> None:
    with pytest.raises(CheckpointError, match="invalid list of shards"):
        write_metadata([[shard]], tmp_path, {})
