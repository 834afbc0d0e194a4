"""Two ranks save to shared files; rank by rank, what came out."""

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
    rank, read = accelerator.process_index, []

    def note(models: Any, weights: Any, directory: str) -> None:
        Path(directory, "note.txt").write_text(str(rank))

    accelerator.register_save_state_pre_hook(note)
    accelerator.register_load_state_pre_hook(
        lambda models, directory: read.append(int(Path(directory, "note.txt").read_text()))
    )
    model = accelerator.prepare(torch.nn.Linear(3, 1))
    accelerator.save_state(folder / "run", blocking=False)
    accelerator.load_state(folder / "run")
    try:
        accelerator.save_state("memory://run")
        said = "taken"
    except CheckpointError as error:
        said = str(error)
    weight = accelerator.unwrap_model(model).weight.tolist()
    write_result({"rank": rank, "own": read[0], "memory": said, "weight": weight})
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
