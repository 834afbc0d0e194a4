"""The file format: fixed-width records in numbered files, and an index that is written last.

`index.json` lists the fields of a record (name, dtype, shape), and the files with their number of
records. A record consists of the bytes of its fields, in the byte order of the machine.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from accelerate_core.plugin import ConfigurationError

__all__ = ["Records", "write_records"]

_FORMAT = 1


@dataclass(frozen=True)
class _Field:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        """Number of bytes in a record."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_records(
    folder: str | os.PathLike[str],
    records: Iterable[Mapping[str, torch.Tensor]],
    per_shard: int = 65536,
) -> None:
    """Write records to a folder. Readers see them once all are written.

    Args:
        folder: the folder, which is created if needed.
        records: one mapping of fields per record, all with the same names, dtypes and shapes.
        per_shard: number of records per file.

    Raises:
        ConfigurationError: there are no records, or the fields of a record differ from the first.
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    (root / "index.json").unlink(missing_ok=True)
    remaining = iter(records)
    fields = None
    shards: list[dict[str, Any]] = []
    while True:
        group = list(islice(remaining, per_shard))
        if not group:
            break
        if fields is None:
            fields = _fields_of(group[0])
        rows = torch.stack([_to_bytes(record, fields) for record in group])
        file = f"{len(shards):05d}.bin"
        (root / file).unlink(missing_ok=True)
        mapped = torch.from_file(
            str(root / file), shared=True, size=rows.numel(), dtype=torch.uint8
        )
        mapped.copy_(rows.flatten())
        shards.append({"file": file, "records": len(group)})
    if fields is None:
        raise ConfigurationError(f"There are no records to write to {root}.")
    described = [
        {"name": one.name, "dtype": str(one.dtype).removeprefix("torch."), "shape": one.shape}
        for one in fields
    ]
    index = {"format": _FORMAT, "fields": described, "shards": shards}
    beside = root / "index.json.new"
    beside.write_text(json.dumps(index), encoding="utf-8")
    beside.replace(root / "index.json")


def _fields_of(record: Mapping[str, torch.Tensor]) -> list[_Field]:
    return [_Field(name, value.dtype, tuple(value.shape)) for name, value in record.items()]


def _to_bytes(record: Mapping[str, torch.Tensor], fields: list[_Field]) -> torch.Tensor:
    if _fields_of(record) != fields:
        raise ConfigurationError(
            f"A record has the fields {_fields_of(record)}, but the first record has {fields}."
        )
    return torch.cat([value.contiguous().view(-1).view(torch.uint8) for value in record.values()])


class Records(Dataset[dict[str, torch.Tensor]]):
    """A dataset of records written by `write_records`. Each record is a dict of tensors.

        loader = DataLoader(Records("data"), batch_size=64, shuffle=True)

    Files are mapped into memory on first use, so processes on one machine share that memory.

    Raises:
        ConfigurationError: there is no index, its format is not supported, or the size of a file
            differs from the index.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            index = json.loads((self.folder / "index.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{self.folder} contains no records: {error}") from error
        if index.get("format") != _FORMAT:
            raise ConfigurationError(
                f"{self.folder}/index.json has format {index.get('format')!r}, but only format "
                f"{_FORMAT} is supported."
            )
        self.fields = [
            _Field(one["name"], getattr(torch, one["dtype"]), tuple(one["shape"]))
            for one in index["fields"]
        ]
        self.width = sum(one.width for one in self.fields)
        self.files = [(str(one["file"]), int(one["records"])) for one in index["shards"]]
        for file, count in self.files:
            path = self.folder / file
            size = path.stat().st_size if path.is_file() else 0
            if size != count * self.width:
                raise ConfigurationError(
                    f"{path} has {size} bytes, but the index lists {count} records of {self.width} "
                    "bytes."
                )
        self._ends = torch.tensor([count for _, count in self.files]).cumsum(0)
        self._mapped: dict[int, torch.Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": {}}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return {name: one[0] for name, one in self.take(torch.tensor([index % len(self)])).items()}

    def take(self, indices: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the records at these indices (int64, [n]) as a batch of tensors [n, ...]."""
        shards = torch.bucketize(indices, self._ends, right=True)
        rows = torch.empty(len(indices), self.width, dtype=torch.uint8)
        for shard in sorted(set(shards.tolist())):
            here = shards == shard
            mapped, first = self._rows(shard)
            rows[here] = mapped[indices[here] - first]
        return dict(self._split(rows))

    def _rows(self, shard: int) -> tuple[torch.Tensor, int]:
        """Return the bytes of a shard, uint8 [records, width], and the index of its first record."""
        file, count = self.files[shard]
        if shard not in self._mapped:
            path, size = str(self.folder / file), count * self.width
            mapped = torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
            self._mapped[shard] = mapped.view(count, self.width)
        return self._mapped[shard], int(self._ends[shard]) - count

    def _split(self, rows: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        start = 0
        for one in self.fields:
            # A copy is aligned for every dtype. A view of the row need not be.
            part = rows[:, start : start + one.width].clone(memory_format=torch.contiguous_format)
            yield one.name, part.view(one.dtype).reshape(len(rows), *one.shape)
            start += one.width
