"""One rank of a run that saves and loads with the configured checkpointer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from accelerate_core import Accelerator
from accelerate_core.errors import CheckpointError
from accelerate_testing import write_result


def main() -> None:
    accelerator = Accelerator(cpu=True, process_group_timeout=60)
    model: Any = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 0.1))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    saved = accelerator.unwrap_model(model).weight.detach().clone()
    imported = [name for name in sys.modules if name.split(".")[0] == "accelerate_fsspec"]
    where = accelerator.save_state("step_1")
    optimizer.step()
    accelerator.load_state("step_1")
    try:
        accelerator.load_state("step_2")
        refused, notes = "", []
    except CheckpointError as error:
        refused, notes = str(error), error.__notes__
    write_result(
        {
            "where": where,
            "same": torch.equal(saved, accelerator.unwrap_model(model).weight),
            "imported": imported,
            "explain": accelerator.explain(),
            "refused": refused,
            "notes": notes,
            "here": Path("step_1").exists(),
        }
    )
    accelerator.end_training()


main()
