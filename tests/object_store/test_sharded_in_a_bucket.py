"""Sharded checkpoints in a bucket: each machine fetches the shards of its own ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file
from support import run_workers

from accelerate_launch.cli import cli

WORKER = Path(__file__).with_name("sharded_worker.py")


@pytest.mark.dist
@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_machine_fetches_its_own_shards_and_others_only_if_it_reads_them(
    layout: str, tmp_path: Path
) -> None:
    """Rank 0 also writes what isn't sharded, so both machines fetch its file at first.

    Both ranks hold replicated shards, but each writes only some of them. Rank 0 fetches the file of
    rank 1 when it reads those that rank 1 wrote. The command `merge-weights` fetches the shards of both.
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
    merged = CliRunner().invoke(
        cli, ["merge-weights", f"s3://tests/{layout}/step_1", str(tmp_path / "out")]
    )
    assert merged.exit_code == 0, merged.output
    shapes = {
        name: list(t.shape) for name, t in load_file(tmp_path / "out/model.safetensors").items()
    }
    assert shapes == {
        "0.weight": [256, 64], "0.bias": [256], "2.weight": [64, 256], "2.bias": [64],
    }  # fmt: skip
