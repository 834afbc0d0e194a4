"""Saves on two ranks to files, memory and an archive, and reports the result of each rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from accelerate_core import Accelerator
from accelerate_core.errors import CheckpointError
from accelerate_testing import write_result


def main(folder: Path) -> None:
    accelerator = Accelerator(cpu=True, checkpointer="fsspec", process_group_timeout=60)
    read: list[str] = []

    def note(models: Any, weights: Any, directory: str) -> None:
        Path(directory, "note.txt").write_text("both")

    accelerator.register_save_state_pre_hook(note)
    accelerator.register_load_state_pre_hook(
        lambda models, directory: read.append(Path(directory, "note.txt").read_text())
    )
    model = accelerator.prepare(torch.nn.Linear(3, 1))
    accelerator.save_state(folder / "run", blocking=False)
    accelerator.load_state(folder / "run")
    errors = []
    for target in ("memory://run", f"zip://{folder}/run.zip"):
        try:
            accelerator.save_state(target)
            errors.append("no error")
        except CheckpointError as error:
            errors.append(str(error))
    weight = accelerator.unwrap_model(model).weight.tolist()
    write_result({"read": read[0], "memory": errors[0], "archive": errors[1], "weight": weight})
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
