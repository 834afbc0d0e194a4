"""Creates the datasets of the conformance suite."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate_records import Records, write_records
from torch.utils.data import DataLoader


def make(
    folder: Path, samples: int, batch_size: int, shuffle: bool, drop_last: bool
) -> DataLoader[dict[str, torch.Tensor]]:
    """Return a loader of the samples 0, 1, ... The field `id` is the number of the sample."""
    if not folder.exists():
        numbers = torch.arange(samples)
        records = [{"x": torch.full((2,), float(i)), "id": numbers[i]} for i in range(samples)]
        write_records(folder, records, per_shard=5)
    return DataLoader(Records(folder), batch_size, shuffle=shuffle, drop_last=drop_last)
