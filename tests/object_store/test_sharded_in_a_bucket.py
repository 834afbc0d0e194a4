"""Sharded checkpoints in a bucket: each machine fetches the shards of its own ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import run_workers

WORKER = Path(__file__).with_name("sharded_worker.py")


@pytest.mark.dist
@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_machine_fetches_its_own_shards_and_others_only_if_it_reads_them(layout: str) -> None:
    """Rank 0 also writes what isn't sharded, so both machines fetch its file at first.

    Both ranks hold replicated shards, but each writes only some of them. Rank 0 fetches the file of
    rank 1 when it reads those that rank 1 wrote.
    """
    run = run_workers(WORKER, 2, [f"s3://tests/{layout}", layout], timeout=200)
    assert run.ok, run.story
    files = [f"backend_fsdp2/__{rank}_0.distcp" for rank in (0, 1)]
    read_by = [files, files] if layout == "replicated" else [files[:1], files]
    for rank, result in enumerate(run.results):
        fetched = result["fetched"]
        assert result["same"]
        assert sorted(name for name in fetched if name.endswith(".distcp")) == read_by[rank]
        states = [name for name in fetched if name.startswith("random_states")]
        assert sorted(states) == [f"random_states_{one}.pkl" for one in range(rank + 1)]
