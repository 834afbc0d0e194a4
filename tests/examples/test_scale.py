"""What a rank sends and receives does not grow with the number of ranks, counted by `benchmarks/scale.py`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pool
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scale.py"
SMALL, LARGE = 32, 256

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], dict[str, Any]]:
    """Return the figures of each phase, for the first and another rank of two runs."""
    found = {}
    for world in (SMALL, LARGE):
        folder = tmp_path_factory.mktemp(f"of_{world}")
        for name, rank in (("first", 0), ("other", world // 2 + 1)):
            command = [SCRIPT, "--child", str(world), str(rank), folder]
            done = pool.run(command, {**os.environ, "OMP_NUM_THREADS": "1"}, 240, rank)
            assert done.returncode == 0, done.stderr
            found[world, name] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["first", "other"])
def test_a_rank_sends_as_many_messages_in_a_large_run(played: Any, name: str) -> None:
    for phase, small in played[SMALL, name].items():
        large = played[LARGE, name][phase]
        for what in ("store_messages", "collectives"):
            assert large[what] == small[what], (phase, what)


@pytest.mark.timeout(600)
def test_only_the_first_rank_receives_more_bytes_through_the_store(played: Any) -> None:
    for phase, small in played[SMALL, "other"].items():
        grown = played[LARGE, "other"][phase]["store_bytes"] - small["store_bytes"]
        assert grown <= 32, phase  # the numbers of the ranks have more digits
    # The first rank receives a list of the files and one of the shards, and nothing else of every rank.
    first = played[LARGE, "first"]["save"]["store_bytes"] / LARGE
    assert first < 1200


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["first", "other"])
def test_our_collectives_do_not_return_a_value_of_every_rank(played: Any, name: str) -> None:
    ours = ("construct the Accelerator", "prepare a loader", "save", "load", "clean up")
    for phase in ours:
        small, large = (played[world, name][phase]["collective_bytes"] for world in (SMALL, LARGE))
        assert large <= small, phase
