"""Without accelerate-dispatch, dispatched loaders are an error that names the package and a way out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from accelerate_core.config.handlers import DataLoaderConfiguration
from accelerate_core.data.loader import LoaderOptions
from accelerate_core.data.prepare_loader import prepare_loader
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.distributed.torch_collectives import TorchCollectives, bind_collectives
from accelerate_core.errors import MissingPluginError


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(8)


def options(dispatch: bool | None) -> LoaderOptions:
    hooks: Any = bind_collectives(TorchCollectives())
    comm = Communicator(rank=1, size=2, device=None, hooks=hooks)  # type: ignore[arg-type]
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    return LoaderOptions(config=config, num_processes=2, process_index=1, comm=comm)


@pytest.mark.parametrize(
    ("dispatch", "data", "asked"),
    [
        (None, Numbers(), "An iterable dataset on several processes"),
        (True, list(range(8)), "dispatch_batches=True"),
    ],
)
def test_missing_package_is_named_before_anything_is_read(
    dispatch: bool | None, data: Any, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_DISABLED_PLUGINS", "accelerate-dispatch")
    with pytest.raises(MissingPluginError, match=asked) as caught:
        prepare_loader(DataLoader(data, batch_size=2), options(dispatch))
    assert "pip install" in str(caught.value)
    assert "dispatch_batches=False" in str(caught.value)


def test_each_rank_reads_the_stream_itself_without_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_DISABLED_PLUGINS", "accelerate-dispatch")
    own = replace(options(False), comm=None)  # nothing to compare the data with
    loader = prepare_loader(DataLoader(Numbers(), batch_size=2), own)
    assert [batch.tolist() for batch in loader] == [[2, 3], [6, 7]]
