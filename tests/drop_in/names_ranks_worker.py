"""Names of Accelerate that need several ranks, tested on two."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, IterableDataset
from worker import PG_TIMEOUT, RANK, case, run_cases

from accelerate_core import Accelerator, DataLoaderConfiguration
from accelerate_core.errors import ConfigurationError, DistributedOperationException
from accelerate_drop_in.accelerator import Accelerator as Scripts
from accelerate_drop_in.by_hand import DataLoaderDispatcher, DataLoaderShard
from accelerate_drop_in.data_loader import prepare_data_loader
from accelerate_drop_in.inference import build_pipeline, prepare_pippy
from accelerate_drop_in.trees import TENSOR_INT_TO_DTYPE
from accelerate_drop_in.verbs import (
    broadcast_object_list,
    chained_operation,
    gather_tensor_shape,
    verify_operation,
)

KEPT = Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT)


def tower() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


@case
def pipeline_has_the_same_output_as_one_process() -> None:
    warnings.filterwarnings("ignore", message=".*treespec.*")  # a warning of torch's tracing
    rows = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    expected = tower()(rows)
    for points, gathers in (("auto", True), (["2"], False)):
        model = prepare_pippy(
            tower(),
            split_points=points,
            example_args=(torch.ones(2, 4),),
            gather_output=gathers,
        )
        assert len(model.hf_split_points) == 1
        with torch.no_grad():
            output = model(rows)  # three rows are padded to four
        if gathers or RANK == 1:
            torch.testing.assert_close(output[:3], expected)
        else:
            assert output is None
    with pytest.raises(ConfigurationError, match="3 stages"):
        build_pipeline(tower(), ["1", "2"], (torch.ones(2, 4),), None, 2)


@case
def checked_operations_report_differences() -> None:
    shape, number = gather_tensor_shape(torch.ones(2, 3, dtype=torch.int8) if RANK else None)
    assert (shape.tolist(), TENSOR_INT_TO_DTYPE[number]) == ([2, 3], torch.int8)

    @chained_operation
    @verify_operation
    def twice(tensor: Any) -> Any:
        return tensor * 2

    assert twice(torch.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(DistributedOperationException, match=r"twice failed.*process 1: \[3\]"):
        twice(torch.ones(2 + RANK))
    with pytest.raises(DistributedOperationException, match="meta"):
        twice(tensor=torch.ones(2, device="meta"))


@case
def loaders_created_by_a_script_divide_or_share_data() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    alike = prepare_data_loader(DataLoader(list(range(4)), 2), torch_device_mesh=mesh)
    assert [batch.tolist() for batch in alike] == [[0, 1], [2, 3]]
    sent = DataLoaderDispatcher(list(range(4)), batch_size=1)
    assert [batch.tolist() for batch in sent] == [[RANK], [RANK + 2]]
    torch.manual_seed(RANK)
    generator = torch.Generator().manual_seed(RANK)
    order = torch.utils.data.RandomSampler(range(8), generator=generator)
    shard = DataLoaderShard(list(range(8)), rng_types=["generator"], sampler=order, batch_size=8)
    (batch,) = shard
    batches = KEPT.gather(batch[None])
    assert torch.equal(batches[0], batches[1])


@dataclass
class Shards(IterableDataset[int]):
    """A stream in shards, as Hugging Face's datasets have."""

    parts: list[list[int]]

    @property
    def n_shards(self) -> int:
        return len(self.parts)

    def shard(self, num_shards: int, index: int) -> Shards:
        return Shards(self.parts[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        return iter([one for part in self.parts for one in part])

    def state_dict(self) -> dict[str, int]:
        return {"seen": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError("this is the state of rank 0, which reads other shards")


@case
def streams_with_enough_shards_are_divided_by_shards() -> None:
    def loader(*parts: list[int]) -> Any:
        return DataLoader(Shards(list(parts)), 2)

    def read(loader: Any) -> list[list[int]]:
        return [batch.tolist() for batch in loader]

    reads = DataLoaderConfiguration(dispatch_batches=False)
    scripts: Any = Scripts(cpu=True, dataloader_config=reads)
    parts = [0, 1, 2], [3, 4, 5], [6, 7], [8]
    own = ([[0, 1], [2, 6], [7]], [[3, 4], [5, 8]])[RANK]
    prepared = scripts.prepare(loader(*parts))
    assert isinstance(prepared.dataset, Shards)
    for made in (prepared, prepare_data_loader(loader(*parts), dispatch_batches=False)):
        assert read(made) == read(made) == own
        assert made.remainder == -1  # no batch was filled up
    begun = scripts.prepare_data_loader(loader(*parts))
    next(iter(begun))
    (state,) = broadcast_object_list([begun.state_dict()])
    begun.load_state_dict(state)
    assert read(begun) == own[1:]
    few = scripts.prepare(loader([*range(8)]))
    assert read(few) == [[2 * RANK, 2 * RANK + 1], [4 + 2 * RANK, 5 + 2 * RANK]]
    split = prepare_data_loader(loader(*parts), dispatch_batches=False, split_batches=True)
    assert read(split)[0] == [RANK]


if __name__ == "__main__":
    run_cases()
    KEPT.end_training()
