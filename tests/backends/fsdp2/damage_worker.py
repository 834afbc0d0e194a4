"""Damage each file of a sharded checkpoint in four ways, and try to load it on two ranks."""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt import GPT
from torch.utils.data import DataLoader, TensorDataset
from worker import RANK, Counter, damage, write_result

from accelerate_core import Accelerator
from accelerate_core.errors import CheckpointError
from accelerate_core.utils import ProjectConfiguration


def own(model: Any) -> torch.Tensor:
    """Return this rank's part of a weight."""
    weight = model.layers[0].q.weight.detach()
    return (weight.to_local() if hasattr(weight, "to_local") else weight).clone()


def main(folder: Path, backend: str = "fsdp2") -> None:
    accelerator = Accelerator(
        cpu=True,
        backend=backend,
        project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=True),
        gradient_accumulation_steps=2,
        process_group_timeout=60,
    )
    model: Any = GPT()
    adam: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    decay: Any = torch.optim.lr_scheduler.ExponentialLR(adam, 0.95)
    loader: Any = DataLoader(TensorDataset(torch.zeros(96, 17)), 4, shuffle=True)
    model, adam, decay, loader = accelerator.prepare(model, adam, decay, loader)
    newest, kept = folder / "checkpoints" / "checkpoint_1", folder / "kept"
    if RANK == 0:
        shutil.copytree(newest, kept)
    accelerator.wait_for_everyone()
    accelerator.register_for_checkpointing(Counter())
    before = own(model)
    tried = []
    files = sorted(path for path in kept.rglob("*") if path.is_file())
    for number, path in enumerate(files):
        name = path.relative_to(kept).as_posix()
        for how in ("flipped", "truncated", "emptied", "deleted"):
            if RANK == 0:
                damage(newest / name, how)
            accelerator.wait_for_everyone()
            with pytest.raises(CheckpointError) as failure:
                accelerator.load_state(newest)
            assert os.path.basename(name) in str(failure.value), (name, how, str(failure.value))
            assert torch.equal(own(model), before), (name, how)
            if number % 3 == 0 and how == "flipped":
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    assert accelerator.load_state().endswith("checkpoint_0")
                before = own(model)
            accelerator.wait_for_everyone()
            if RANK == 0:
                (newest / name).unlink(missing_ok=True)
                shutil.copy(path, newest / name)
            accelerator.wait_for_everyone()
            tried.append((name, how))
    accelerator.load_state(newest)
    assert not torch.equal(own(model), before)
    assert json.loads((newest / "manifest.json").read_text())["content"]["world_size"] == 2
    write_result(tried)
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
