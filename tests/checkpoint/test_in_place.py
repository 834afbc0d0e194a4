"""Shards are read into the memory of the model, without a copy of the stored tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from accelerate_checkpoint import SafeReader, read_metadata
from accelerate_checkpoint.in_place import read_in_place

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def stored(folder: Path, **tensors: torch.Tensor) -> Path:
    dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return folder


def left_to_torch(folder: Path, **targets: Any) -> list[str]:
    """Read into tensors, and return the names of those that torch's reader still has to read."""
    metadata = read_metadata(folder)
    planner = DefaultLoadPlanner()
    planner.set_up_planner(dict(targets), metadata)
    plan = create_default_local_load_plan(dict(targets), metadata)
    items = read_in_place(folder, metadata.storage_data, plan.items, planner)
    return [item.dest_index.fqn for item in items]


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(7, 5),
        torch.randn(3, 4, 5).to(torch.bfloat16),
        torch.arange(11, dtype=torch.int8),
        torch.tensor([True, False, True]),
        torch.randn(4, dtype=torch.complex64),
        torch.tensor(3.0),
        torch.empty(0, 3),
    ],
    ids=lambda value: f"{value.dtype}, {list(value.shape)}",
)
def test_tensors_are_read_in_place(tmp_path: Path, value: torch.Tensor) -> None:
    # The tensor before it makes the position in the file odd.
    folder = stored(tmp_path, before=torch.zeros(3, dtype=torch.int8), value=value)
    target = torch.zeros_like(value)
    address = target.data_ptr()
    assert left_to_torch(folder, value=target) == []
    assert torch.equal(target, value)
    assert target.data_ptr() == address


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        (torch.randn(4, 6), torch.zeros(4, 6, dtype=torch.float64)),
        (torch.randn(4, 6), torch.zeros(6, 4).t()),
        (torch.randn(4, 6), torch.zeros(4, 12)[:, ::2]),
    ],
    ids=["another dtype", "transposed in the model", "with gaps in the model"],
)
def test_torch_reads_what_must_be_converted(
    tmp_path: Path, saved: torch.Tensor, target: torch.Tensor
) -> None:
    folder = stored(tmp_path, value=saved)
    assert left_to_torch(folder, value=target) == ["value"]
    reader = SafeReader(folder, read_metadata(folder))
    dcp.load({"value": target}, storage_reader=reader, no_dist=True)
    assert torch.equal(target, saved.to(target.dtype))


@pytest.mark.parametrize(
    ("offsets", "lengths", "in_place"),
    [((2, 0), (3, 6), True), ((2, 1), (1, 4), True), ((0, 1), (5, 2), False)],
    ids=["rows", "part of a row", "columns"],
)
def test_part_of_a_tensor_is_read_in_place_if_it_is_contiguous(
    tmp_path: Path, offsets: tuple[int, ...], lengths: tuple[int, ...], in_place: bool
) -> None:
    """A rank reads parts of stored tensors after the number of ranks has changed."""
    value = torch.randn(5, 6)
    folder = stored(tmp_path, value=value)
    metadata = read_metadata(folder)
    part = {"value": torch.zeros(lengths)}
    planner = DefaultLoadPlanner()
    planner.set_up_planner(dict(part), metadata)
    (index,) = metadata.storage_data
    start = torch.Size([0] * len(lengths))
    item = ReadItem(
        LoadItemType.TENSOR, index, start, index, torch.Size(offsets), torch.Size(lengths)
    )
    others = read_in_place(folder, metadata.storage_data, [item], planner)
    assert others == ([] if in_place else [item])
    if in_place:
        rows, columns = (
            slice(at, at + length) for at, length in zip(offsets, lengths, strict=True)
        )
        assert torch.equal(part["value"], value[rows, columns])
