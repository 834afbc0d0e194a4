"""Unmodified clients that import `accelerate` have the same results with the drop-in as with Accelerate."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from clients import (
    ENVIRONMENTS,
    ROWS,
    TOLERANCE,
    differences_from_accelerate,
    groups,
    recorded,
    run,
)

pytestmark = pytest.mark.skipif(
    not (ENVIRONMENTS / "ours").exists(), reason="run `make clients` to create the environment"
)
#: The cases that .ci/run runs. All others are marked soak.
SHORT = {
    **{("trainer", on): ("basic", "accumulation", "evaluation") for on in (1, 2)},
    **{("trainer@4.57", on): ("basic", "evaluation") for on in (1, 2)},
    **{
        (group, on): tuple(recorded(group, on))
        for group in ("adapter_layers@4.57", "embeddings", "epochs", "small_trainers")
        for on in (1, 2)
    },
    **{("flux", on): ("lora",) for on in (1, 2)},
    ("diffusion_checkpoints", 2): ("unconditional_latest", "text_to_image"),
    ("sd3", 1): ("lora",),
    ("from_pretrained", 1): ("auto",),
    ("quantized", 1): ("by_hand",),
    ("examples", 1): tuple(recorded("examples", 1)),
}
#: Intended differences: for each case, the values that are not compared (without list indices), and why.
KNOWN: dict[tuple[str, int, str], dict[str, str]] = {
    ("trainer", 1, "iterable_evaluation"): {
        ".evaluated.eval_loss": "for a stream, Accelerate counts a short last batch as a full one"
    },
    ("embeddings", 2, "cross_encoder"): dict.fromkeys(
        (".first_epoch.eval_loss", ".later.log.eval_loss"),
        "if the batch sampler drops a short last batch, Accelerate removes real rows from the full one",
    ),
    **{
        ("zero", 2, f"stage_2_with_its_own_optimizer{more}"): {
            ".log.learning_rate": "DeepSpeed's scheduler steps before the Trainer logs the rate"
        }
        for more in ("", "_and_scheduler")
    },
}
CASES = [
    pytest.param(
        (group, processes, case),
        id=f"{group}-{processes}-{case}",
        marks=[] if case in SHORT.get((group, processes), ()) else [pytest.mark.soak],
    )
    for group in groups()
    for processes in (1, 2)
    for case in recorded(group, processes)
]


@pytest.fixture(scope="session")
def ran(request: pytest.FixtureRequest) -> Any:
    """Return a function that runs all requested cases of a file in one launch."""
    asked = defaultdict(list)
    for item in request.session.items:
        if "client" in getattr(getattr(item, "callspec", None), "params", ()):
            group, processes, case = item.callspec.params["client"]  # type: ignore[attr-defined]
            asked[group, processes].append(case)
    made: dict[tuple[str, int], dict[str, Any]] = {}

    def get(group: str, processes: int) -> dict[str, Any]:
        key = (group, processes)
        if key not in made:
            made[key] = run("ours", group, processes, asked[key])
        return made[key]

    return get


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("client", CASES)
def test_client_results_equal_those_with_accelerate(client: tuple[str, int, str], ran: Any) -> None:
    group, processes, case = client
    ours = ran(group, processes)[case]
    assert "error" not in ours, ours["error"]
    known = KNOWN.get((group, processes, case), {})
    found = differences_from_accelerate(
        ours,
        recorded(group, processes)[case],
        lambda: run("theirs", group, processes, [case])[case],
        (".seconds", *known),
    )
    off, where = max(found)
    ROWS.append((f"{group}-{processes}-{case}", off, where))
    assert off <= TOLERANCE, [one for one in found if one[0] > TOLERANCE][:8]
