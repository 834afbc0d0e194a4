"""Damage every file of a sharded checkpoint in three ways, on two tensor parallel ranks."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_worker import begin
from worker import RANK, damage, flat, write_result

from accelerate_core.errors import CheckpointError


def main(layout: dict[str, Any], folder: Path) -> None:
    accelerator, model, *_ = begin(layout, folder)
    newest = max((folder / "checkpoints").iterdir())
    kept = folder / "kept"
    if RANK == 0:
        shutil.copytree(newest, kept)
    accelerator.wait_for_everyone()
    before, tried = flat(model), []
    for path in sorted(path for path in kept.rglob("*") if path.is_file()):
        name = path.relative_to(kept).as_posix()
        for how in ("flipped", "truncated", "deleted"):
            if RANK == 0:
                damage(newest / name, how)
            accelerator.wait_for_everyone()
            with pytest.raises(CheckpointError) as failure:
                accelerator.load_state(newest)
            assert path.name in str(failure.value), (name, how, str(failure.value))
            assert torch.equal(flat(model), before), (name, how)
            accelerator.wait_for_everyone()
            if RANK == 0:
                (newest / name).unlink(missing_ok=True)
                shutil.copy(path, newest / name)
            accelerator.wait_for_everyone()
            tried.append(name)
    accelerator.load_state(newest)
    assert not torch.equal(flat(model), before)
    write_result(tried)
    accelerator.end_training()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
