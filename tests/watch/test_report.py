"""The report names the missing ranks of each group, and the shares of work show who is slow."""

from __future__ import annotations

import time

import pytest

from accelerate_watch.flight_recorder import Collective
from accelerate_watch.report import RankState, compose, find_blocked
from accelerate_watch.stragglers import shares_of_work


def entered(group: str, number: int, pending: bool, operation: str = "all_reduce") -> Collective:
    return Collective(group, "", number, operation, [[4]], ["Float"], time.time(), pending)


def state(rank: int, *collectives: Collective, **more: object) -> RankState:
    groups = {"0": [0, 1, 2, 3], "7": [1, 3]}
    if rank not in groups["7"]:
        del groups["7"]
    return RankState(rank, groups=groups, collectives=list(collectives), **more)  # type: ignore[arg-type]


def test_rank_that_waits_in_another_group_is_missing_there_and_said_to_wait() -> None:
    states = {
        0: state(0, entered("0", 5, True)),
        1: state(1, entered("0", 4, False), entered("7", 2, True, "all_gather")),
        2: state(2, entered("0", 5, True), why="stuck"),
        3: state(3, entered("0", 4, False), entered("7", 1, False, "all_gather")),
    }
    blocked = {one.group: one for one in find_blocked(states)}
    assert blocked["0"].missing == [1, 3]
    assert blocked["7"].missing == [3]
    said = compose(states, 4, None)
    assert "accelerate-watch: stuck (rank 2)." in said
    assert "it waits in all_gather(Float [4]) of group 7" in said
    assert "all_reduce(Float [4]): ranks 0, 2" in said


def test_ranks_of_a_machine_that_does_not_answer_are_listed() -> None:
    said = compose({0: state(0, entered("0", 5, True))}, 4, 30.0)
    assert "No answer from ranks 1-3, and none about it from its machine" in said


def test_oldest_incomplete_collective_counts() -> None:
    states = {rank: state(rank, entered("0", 5, True), entered("0", 6, True)) for rank in range(3)}
    states[3] = state(3, entered("0", 4, False))
    (one,) = find_blocked(states)
    assert (one.number, one.missing, sorted(one.arrived)) == (5, [3], [0, 1, 2])


@pytest.mark.parametrize("different", ["all_gather", "all_reduce"])
def test_different_operations_at_one_position_are_noticed(different: str) -> None:
    states = {0: state(0, entered("0", 5, True)), 1: state(1, entered("0", 5, True, different))}
    (one,) = find_blocked(states)
    assert one.differing == (different != "all_reduce")


def test_share_of_work_is_the_time_until_a_rank_enters_a_collective() -> None:
    slow = {number: float(number) for number in range(6)}
    fast = {0: 0.0, **{number: number - 0.75 for number in range(1, 6)}}
    assert shares_of_work([fast, slow]) == pytest.approx([0.25, 1.0])
    assert shares_of_work([fast, {9: 1.0}]) == []
