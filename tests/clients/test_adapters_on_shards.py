"""PEFT adapters on sharded models, and students with a frozen teacher, train as in one process."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from clients import HERE, PYTHON, needs_environment, run_worker
from support import clean_environment

pytestmark = needs_environment

#: Case -> the largest part of the frozen weights that one of two ranks holds.
SHARES = {
    "lora": 0.51,
    "lora_on_bf16": 0.51,
    "lora_on_shards_at_load": 0.51,
    "lora_on_split_layers": 0.51,
    "qlora": 0.51,
    "qlora_8_bit": 0.85,
    "sharded_teacher": 0.51,
    "whole_teacher": 1.0,
}
#: Case -> the allowed difference, if it computes in bf16.
ROUNDED = {"lora_on_bf16": 5e-3}


def launch(folder: Path, ranks: int, names: list[str]) -> dict[str, Any]:
    """Run the cases on this many ranks, and return their results."""
    folder.mkdir()
    output = run_worker("adapters_worker.py", ranks, folder, *names, timeout=500)
    made = {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
    return made | {"output": output}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of all cases on one and on two ranks, from one launch each."""
    folder = tmp_path_factory.mktemp("adapters")
    return launch(folder / "1", 1, [*SHARES]), launch(folder / "2", 2, [*SHARES, "mistakes"])


def check(one: dict[str, Any], two: dict[str, Any], allowed: float) -> None:
    """Compare the results on two ranks with those of one process."""
    assert two["losses"] == pytest.approx(one["losses"], abs=allowed)
    assert two["adapters"] == pytest.approx(one["adapters"], abs=allowed)
    assert max(map(abs, two["adapters"])) > 0.05
    assert two["frozen"] == one["frozen"]
    assert one["unchanged"]
    assert two["unchanged"]
    assert one["resumed"]
    assert two["resumed"]
    assert two["state"] == one["state"]


@pytest.mark.timeout(1100)
@pytest.mark.parametrize("case", SHARES)
def test_adapters_and_students_equal_one_process(case: str, results: Any) -> None:
    one, two = (result[case] for result in results)
    check(one, two, ROUNDED.get(case, 1e-4))
    assert 0.5 <= two["bytes"] / one["bytes"] <= SHARES[case]


@pytest.mark.soak
@pytest.mark.timeout(1100)
def test_adapters_on_layers_split_by_a_plan_equal_one_process(tmp_path: Path) -> None:
    """In a launch of its own, because torch caches the mesh of an earlier one that is equal."""
    name = "lora_on_own_plan"
    one, two = (launch(tmp_path / str(ranks), ranks, [name])[name] for ranks in (1, 2))
    check(one, two, 1e-4)


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


def test_layers_that_a_plan_cannot_split_are_errors(results: Any) -> None:
    found = results[1]["mistakes"]
    for name in ("own plan", "adapter"):
        assert "distributed_config=DistributedConfig(tp_size=...)" in found[name]
    assert "layer with an adapter" in found["adapter"]
    assert "has quantized it, so it can't be split" in found["packed"]


def test_ranks_start_with_the_scales_of_rank_0(results: Any) -> None:
    found = results[1]["mistakes"]
    assert found["changed"] == [False, True]
    assert found["sent"]


@pytest.mark.timeout(300)
def test_command_for_4_bits_in_the_guide_works(tmp_path: Path) -> None:
    page = HERE.parents[1] / "docs" / "how_to" / "adapters_on_shards.md"
    scripts = re.findall(r'^```python title="(\S+)"\n(.*?)^```$', page.read_text(), re.M | re.S)
    for name, code in scripts:
        (tmp_path / name).write_text(code)
    command = re.search(r"^accelerate-core (launch .* --four-bit)$", page.read_text(), re.M)
    assert command is not None
    for words in (["make_base.py"], ["-m", "accelerate_core", *command[1].split()]):
        done = subprocess.run(
            [str(PYTHON), *words],
            cwd=tmp_path,
            env=clean_environment(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1"),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    held = re.search(r"rank 0 holds ([\d,]+) bytes", done.stdout)
    assert held is not None
    assert int(held[1].replace(",", "")) < 60_000
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
