"""PEFT adapters on sharded models, with whole and quantized frozen weights, equal one process."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from clients import ENVIRONMENTS, HERE
from support import clean_environment

PYTHON = ENVIRONMENTS / "ours" / "bin" / "python"

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="run `make clients` to create the environment"
)

#: Case -> the largest part of the frozen weights that one of two ranks holds.
SHARES = {"lora": 0.51, "qlora": 0.51, "qlora_8_bit": 0.85}


def launch(folder: Path, ranks: int, names: list[str]) -> dict[str, Any]:
    """Run the cases on this many ranks, and return their results."""
    folder.mkdir()
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    done = subprocess.run(
        [
            str(PYTHON),
            *(torchrun if ranks > 1 else []),
            *(str(HERE / "adapters_worker.py"), str(folder), *names),
        ],
        env=clean_environment(
            PYTHONPATH=str(HERE / "cases"),
            OMP_NUM_THREADS="1",
            HF_HUB_OFFLINE="1",
            CUDA_VISIBLE_DEVICES="",
        ),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names} | {
        "output": done.stdout + done.stderr
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of all cases on one and on two ranks, from one launch each."""
    folder = tmp_path_factory.mktemp("adapters")
    return launch(folder / "1", 1, [*SHARES]), launch(folder / "2", 2, [*SHARES, "mistakes"])


@pytest.mark.timeout(700)
@pytest.mark.parametrize("case", SHARES)
def test_adapters_equal_one_process_and_resume_exactly(case: str, results: Any) -> None:
    one, two = (result[case] for result in results)
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-4)
    assert two["adapters"] == pytest.approx(one["adapters"], abs=1e-4)
    assert max(map(abs, two["adapters"])) > 0.05
    assert two["frozen"] == one["frozen"]
    assert one["unchanged"]
    assert two["unchanged"]
    assert two["resumed"]
    assert two["state"] == one["state"]
    assert 0.5 <= two["bytes"] / one["bytes"] <= SHARES[case]


def test_a_warning_says_that_8_bit_weights_stay_whole(results: Any) -> None:
    """4-bit weights are sharded, so there is no warning about them."""
    _, two = results
    warned = [line for line in two["output"].splitlines() if "can't be sharded" in line]
    assert warned
    assert all("(Int8Params)" in line and "Each rank holds all" in line for line in warned)


def test_4_bit_weights_that_sharding_would_destroy_are_errors(results: Any) -> None:
    found = results[1]["mistakes"]
    assert "Call model.to(accelerator.device) before prepare" in found["not quantized"]
    assert "ran in eval mode on this CPU" in found["repacked"]
    assert "stored as torch.float32" in found["converted"]
    assert "leave bnb_4bit_quant_storage out" in found["converted"]
    assert found["floats"] == ""


def test_ranks_start_with_the_scales_of_rank_0(results: Any) -> None:
    found = results[1]["mistakes"]
    assert found["changed"] == [False, True]
    assert found["sent"]
