"""Files of torch.distributed.checkpoint that a rank writes."""

from __future__ import annotations

import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_checkpoint.files import checksum
from accelerate_checkpoint.sharded_save import write_shards
from accelerate_checkpoint.shards import _has_own_crc32_setting


@pytest.mark.skipif(
    not _has_own_crc32_setting(), reason="in this version of torch, all threads share the setting"
)
def test_only_the_thread_that_writes_shards_omits_crc32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_this_thread: list[bool] = []
    in_another: list[bool] = []
    save = torch.save

    def note(found: list[bool]) -> None:
        found.append(torch.serialization.get_crc32_options())

    def watched(*args: Any, **kwargs: Any) -> None:
        note(in_this_thread)
        thread = threading.Thread(target=note, args=(in_another,))
        thread.start()
        thread.join()
        save(*args, **kwargs)

    monkeypatch.setattr(torch, "save", watched)
    entries: dict[str, Any] = {}
    write_shards({"x": torch.arange(5000.0)}, tmp_path, 0, entries)
    assert in_another == [True]
    assert torch.serialization.get_crc32_options() is True
    assert in_this_thread == [False]
    path = tmp_path / "__0_0.distcp"
    assert entries == {path.name: checksum(path)}
    assert torch.equal(torch.load(path, weights_only=True), torch.arange(5000.0))
    with zipfile.ZipFile(path) as archive:
        data = next(one for one in archive.infolist() if one.filename.endswith("/data/0"))
    assert data.file_size == 20000
