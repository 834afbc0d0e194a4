"""Training with accelerate-core and in plain PyTorch: 8 optimizer steps of 2 micro-batches."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from plain import ACCUMULATION, STEPS, History
from plain import one_process as train_one_process
from support import run_workers

HERE = Path(__file__).parent
HALF = ("fp16", "bf16")
RUNS = {
    2: ("fp32", "split", *HALF, "whole", "regional", "bf16_whole"),
    4: ("fp32", "split", *HALF),
}

pytestmark = pytest.mark.dist

one_process = cache(train_one_process)


@pytest.fixture(scope="module", params=sorted(RUNS), ids=lambda count: f"{count} ranks")
def world(request):
    return request.param


@pytest.fixture(scope="module")
def library(world):
    """Train with accelerate-core. All ranks must report the same numbers."""
    run = run_workers(HERE / "parity_worker.py", world, RUNS[world], timeout=240).checked()
    assert all(done == run.results[0] for done in run.results), "the ranks differ"
    return run.results[0]


@pytest.fixture(scope="module")
def by_hand(world):
    """Train with DDP in plain PyTorch, in processes that don't import accelerate-core."""
    run = run_workers(HERE / "plain.py", world, HALF, timeout=240, launched=True).checked()
    return run.results[0]


def difference(one: History, other: History, *keys: str) -> float:
    pairs = [pair for key in keys for pair in zip(one[key], other[key], strict=True)]
    return max(abs(a - b) for a, b in pairs)


def test_every_step_is_recorded(library):
    for name, history in library.items():
        counts = [len(history[key]) for key in ("losses", "norms", "rates")]
        assert counts == [STEPS * ACCUMULATION, STEPS, STEPS], name
        assert history["norms"][0] > 1, "the gradients must be large enough to be clipped"


@pytest.mark.parametrize("name", ["fp32", "split"])
def test_fp32_equals_one_process_with_the_whole_batch(world, library, name):
    # A loader's batch size is per rank, and the schedule is written for the number of batches on one
    # process, so it steps `world` times. With split_batches the number of batches is unchanged: once.
    reference = one_process(world, 1 if name == "split" else world, "no")
    assert difference(library[name], reference, "losses", "norms", "rates", "weights") <= 1e-5


@pytest.mark.parametrize(
    "world",
    [pytest.param(2, id="2 ranks"), pytest.param(4, id="4 ranks", marks=pytest.mark.soak)],
    indirect=True,
)
@pytest.mark.parametrize("precision", HALF)
def test_half_precision_equals_a_loop_by_hand(library, by_hand, precision):
    keys = ("losses", "norms", "rates", "scales", "weights")
    assert difference(library[precision], by_hand[precision], *keys) == 0


@pytest.mark.parametrize("reference", ["same", "no"])
@pytest.mark.parametrize("precision", HALF)
def test_half_precision_is_near_one_process(world, library, precision, reference):
    alone = one_process(world, world, precision if reference == "same" else "no")
    assert difference(library[precision], alone, "losses", "norms", "rates") <= 1e-2


@pytest.mark.parametrize("world", [2], indirect=True)
@pytest.mark.parametrize(
    ("compiled", "plain"), [("whole", "fp32"), ("regional", "fp32"), ("bf16_whole", "bf16")]
)
def test_compiled_model_has_the_same_results(library, compiled, plain):
    assert library[compiled]["graphs"][0] > library[plain]["graphs"][0] == 0
    keys = ("losses", "norms", "rates", "weights")
    assert difference(library[compiled], library[plain], *keys) == 0
