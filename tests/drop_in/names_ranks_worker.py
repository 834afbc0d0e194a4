"""Names of the original that need several ranks, on two."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from worker import PG_TIMEOUT, RANK, case, run_cases

from accelerate_core import Accelerator
from accelerate_core.errors import ConfigurationError, DistributedOperationException
from accelerate_drop_in.by_hand import DataLoaderDispatcher, DataLoaderShard
from accelerate_drop_in.data_loader import prepare_data_loader
from accelerate_drop_in.inference import build_pipeline, prepare_pippy
from accelerate_drop_in.trees import TENSOR_INT_TO_DTYPE
from accelerate_drop_in.verbs import chained_operation, gather_tensor_shape, verify_operation

KEPT = Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT)


def tower() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


@case
def a_pipeline_computes_what_one_process_does() -> None:
    warnings.filterwarnings("ignore", message=".*treespec.*")  # torch's tracing warns of itself
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
            told = model(rows)  # three rows are filled up to four
        if gathers or RANK == 1:
            torch.testing.assert_close(told[:3], expected)
        else:
            assert told is None
    with pytest.raises(ConfigurationError, match="3 stages"):
        build_pipeline(tower(), ["1", "2"], (torch.ones(2, 4),), None, 2)


@case
def operations_that_are_checked_say_what_differs() -> None:
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
def loaders_share_what_they_are_told_to() -> None:
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
    told = KEPT.gather(batch[None])
    assert torch.equal(told[0], told[1])


if __name__ == "__main__":
    run_cases()
    KEPT.end_training()
