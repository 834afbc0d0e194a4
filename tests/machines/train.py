"""The script for the two machines: it saves checkpoints and resumes from the newest."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

from accelerate_core import Accelerator, ProjectConfiguration

STEPS = int(sys.argv[2])
PACE = float(sys.argv[3])


def main(folder: Path) -> None:
    project = ProjectConfiguration(
        str(folder), automatic_checkpoint_naming=True, save_on_each_node=False
    )
    accelerator = Accelerator(cpu=True, project_config=project, process_group_timeout=10)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    step = torch.zeros(1)

    class Progress:
        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"step": step}

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            step.copy_(state["step"])

    accelerator.register_for_checkpointing(Progress())
    begun = sorted((folder / "checkpoints").glob("checkpoint_*"))
    if begun:
        accelerator.load_state()
    first = int(step)
    for number in range(first, STEPS):
        data = torch.Generator().manual_seed(100 * number + accelerator.process_index)
        loss = model(torch.randn(8, 4, generator=data)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step.fill_(number + 1)
        if number % 5 == 4:
            accelerator.save_state()
        note = folder / f"rank{accelerator.process_index}.step"
        note.write_text(f"{os.getpid()} {number + 1}")
        time.sleep(PACE)
    weights = [value.tolist() for value in accelerator.get_state_dict(model).values()]
    if accelerator.is_main_process:
        said = {"first": first, "weights": weights, "size": accelerator.num_processes}
        (folder / "done.json").write_text(json.dumps(said))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
