"""Ranks that drift apart are named. Cases: `drift_worker.py`."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import case_names, check_case, run_workers

from accelerate_watch import drift

WORKER = Path(__file__).with_name("drift_worker.py")

pytestmark = pytest.mark.dist

RUNS = [("ddp", 2), ("ddp", 4), ("fsdp2", 2)]


@pytest.fixture(scope="module", params=RUNS, ids=lambda run: f"{run[0]} on {run[1]} ranks")
def run(request):
    backend, count = request.param
    return run_workers(WORKER, count, [backend], timeout=150)


@pytest.mark.parametrize("case", case_names(WORKER))
def test_case(run, case):
    check_case(run, case)


def test_difference_early_in_a_run_is_captured_within_20_steps():
    steps = [drift.next_step(0)]
    while steps[-1] < 10_000:
        steps.append(drift.next_step(steps[-1]))
    assert steps[:4] == [1, 2, 10, 20]
    assert all(later - step <= max(10, step / 20) for step, later in itertools.pairwise(steps))
    assert len(steps) < 110


def test_tensors_that_are_not_in_host_memory_are_not_read():
    group = {
        "params": [],
        "lr": torch.tensor(0.1, device="meta"),
        "eps": torch.tensor(0.5),
        "betas": (0.9, 0.99),
        "fused": None,
        "hook": object(),
    }
    assert drift.hyperparameters([group]) == {
        "eps of group 0": "0.5",
        "betas of group 0": "(0.9, 0.99)",
        "fused of group 0": "None",
    }


def test_layer_that_one_rank_unfroze_is_named():
    """Backends refuse this where they can, so it is compared without one."""

    def captured(unfrozen: bool) -> drift.Record:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        model[0].requires_grad_(unfrozen)
        facts = {"trained parameters": drift._packed(drift.trained_parameters([model]))}
        return drift.Record(0, "AdamW", 10, 10, 30, 40, facts)

    assert drift.differences(captured(False), captured(False)) == {}
    assert drift.differences(captured(False), captured(True)) == {
        "trained parameters": {
            "0.weight of model 0": ("frozen", "trained"),
            "0.bias of model 0": ("frozen", "trained"),
        }
    }


class Setup:
    """The members of an Accelerator that the comparison of records needs."""

    provenance = {"scheduler_metric": type("Value", (), {"value": "mean"})}

    def __init__(self, rank: int) -> None:
        self.process_index = rank


def record(step: int, rate: float = 0.1, name: str = "lr of group 0") -> drift.Record:
    facts = {"hyperparameters": drift._packed({name: f"{rate}"})}
    return drift.Record(0, "AdamW", step, step, 3 * step, 4 * step, facts)


def compared(records: list[list[drift.Record]]) -> tuple[list[drift.Drift], int]:
    """Let ranks look at a store after each of their records; return them and its largest number of keys."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    setups = [Setup(rank) for rank in range(len(records))]
    ranks = [drift.Drift(one, False, range(len(records)), lambda: None) for one in setups]
    keys = 0
    for step in zip(*records, strict=True):
        for rank, captured in zip(ranks, step, strict=True):
            rank._key = "drift"
            rank._captured.append(captured)
            rank.look(store)
        keys = max(keys, store.num_keys())
    return ranks, keys


def test_number_of_keys_does_not_grow_with_the_run():
    few = compared([[record(step) for step in range(5)]] * 3)[1]
    many = compared([[record(step) for step in range(300)]] * 3)[1]
    assert many == few


def test_error_of_the_comparison_does_not_end_the_thread():
    broken = drift.Record(0, "AdamW", 1, 1, 3, 4, {"hyperparameters": ("digest", None)})
    ranks, _ = compared([[record(1)], [broken]])
    assert "Error" in ranks[1].failed


def test_message_names_the_ranks_of_each_value():
    found = [
        {"rank": rank, "optimizer": 0, "name": "AdamW", "step": 10, "entries": {"lr": ["1", "2"]}}
        for rank in (1, 3)
    ]
    text = drift.describe("hyperparameters", found, range(4))
    assert "After step 10 of optimizer 0 (AdamW)" in text
    assert "lr: 1 on ranks 0, 2, 2 on ranks 1, 3." in text
