"""Checkpoints have the names of the plain model, however the script compiled it before `prepare`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compiled_names_worker import KINDS, Block, Graphs, Holder, Net, compiled
from safetensors.torch import load_file, save_file
from support import run_workers
from torch import nn

from accelerate_core import Accelerator, load_checkpoint_in_model
from accelerate_core.plugin import is_compiled_in_place, is_wrapped

WORKER = Path(__file__).with_name("compiled_names_worker.py")


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("backend", "ranks", "env"),
    [
        ("single", 1, {}),
        ("ddp", 2, {}),
        ("fsdp2", 2, {}),
        ("fsdp2", 2, {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}),
        ("deepspeed", 2, {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}),
    ],
)
def test_compiled_and_plain_runs_load_each_others_checkpoints(
    tmp_path: Path, backend: str, ranks: int, env: dict[str, str]
) -> None:
    arguments = [tmp_path, backend]
    more = ["torch._dynamo"]
    result = run_workers(WORKER, ranks, arguments, timeout=300, env=env, more=more).checked()
    assert result.results == [{}] * ranks


@pytest.mark.parametrize("kind", ["blocks", "nested", "with_hook", "held"])
def test_unprepared_models_are_saved_and_loaded_with_plain_names(tmp_path: Path, kind: str) -> None:
    accelerator = Accelerator(cpu=True)
    model = KINDS[kind](Net())
    accelerator.save_model(model, tmp_path)
    names = set(accelerator.get_state_dict(model))
    assert names == set((Net() if kind != "held" else KINDS["held"](Net())).state_dict())
    for loaded in ("plain", "nested", kind):
        other = KINDS[loaded](Net())
        load_checkpoint_in_model(other, tmp_path, strict=True)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_module_that_is_really_called_orig_mod_is_not_mistaken_for_a_compiled_one(
    tmp_path: Path,
) -> None:
    accelerator = Accelerator(cpu=True)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(2, 2)
            self._orig_mod = Block()

    model = accelerator.prepare(Both())
    accelerator.save_model(model, tmp_path / "both")
    saved = load_file(tmp_path / "both" / "model.safetensors")
    assert set(saved) == set(Both().state_dict())
    other = Both()
    load_checkpoint_in_model(other, tmp_path / "both", strict=True)
    assert torch.equal(other._orig_mod.mix.weight, model._orig_mod.mix.weight)
    assert torch.equal(other.mix.weight, model.mix.weight)

    save_file({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, tmp_path / "plain.safetensors")
    holder = Holder(nn.Linear(2, 2))
    with pytest.raises(Exception, match="lacks _orig_mod"):
        load_checkpoint_in_model(holder, tmp_path / "plain.safetensors", strict=True)


def test_compiled_parts_stay_compiled_with_their_options() -> None:
    net = Net()
    net.blocks[0] = torch.compile(net.blocks[0], backend=Graphs(), fullgraph=True, dynamic=True)
    shared = compiled(net.blocks[1])
    net.blocks[1] = shared
    net.blocks.append(shared)
    model = Accelerator(cpu=True).prepare(net)
    assert not any(is_wrapped(part) for part in model.modules())
    assert all(is_compiled_in_place(part) for part in model.blocks)
    assert model.blocks[1] is model.blocks[2]
    Graphs.count = 0
    for rows in (2, 3, 5):
        model(torch.ones(rows, 4))
    assert Graphs.count <= 3  # one dynamic graph, and at most two for the others

    class Breaks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return x

    broken = nn.ModuleDict({"inner": torch.compile(Breaks(), backend="eager", fullgraph=True)})
    broken = Accelerator(cpu=True).prepare(broken)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        broken["inner"](torch.ones(2))
