"""Records are read back as they were written."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate_records import Records, write_records


def test_records_are_read_back_with_any_alignment_of_fields(tmp_path: Path) -> None:
    rows = [{"x": torch.full((3,), float(n)), "y": torch.tensor(n)} for n in range(12)]
    write_records(tmp_path, rows, per_shard=5)
    records = Records(tmp_path)
    assert len(records) == 12
    for index, row in enumerate(rows):
        assert torch.equal(records[index]["x"], row["x"])
        assert torch.equal(records[index]["y"], row["y"])
    assert records.take(torch.tensor([11, 0, 7]))["y"].tolist() == [11, 0, 7]
