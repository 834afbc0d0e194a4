"""Train on digits on the ranks of a launch, and continue from the newest checkpoint after a restart.

    ray_digits.py FOLDER SECONDS

FOLDER gets the checkpoints and the final weights. SECONDS is the pause between two batches, in which a
test can interfere. Rank 0 prints each step, where it continued, and the accuracy.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from digits import loader, make_net

from accelerate_core import Accelerator
from accelerate_core.utils import ProjectConfiguration, set_seed

EPOCHS, SAVE_EVERY = 3, 5


def train(folder: Path, pause: float) -> float:
    config = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=config, process_group_timeout=60)
    set_seed(3)
    data = loader(640, 16, shuffle=True)
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    step = Steps()
    accelerator.register_for_checkpointing(step)
    if any((folder / "checkpoints").glob("checkpoint_*")):
        accelerator.load_state()
        accelerator.print(f"continues at step {step.done}")
    for _ in range(data.iteration, EPOCHS):
        for images, labels in data:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step.done += 1
            accelerator.print(f"step {step.done}")
            if step.done % SAVE_EVERY == 0:
                accelerator.save_state()
            time.sleep(pause)
    right = total = 0
    test = accelerator.prepare(loader(300, 50, start=1400))
    model.eval()
    for images, labels in test:
        with torch.no_grad():
            guesses = model(images).argmax(1)
        guesses, labels = accelerator.gather_for_metrics((guesses, labels))
        right += int((guesses == labels).sum())
        total += len(labels)
    accelerator.print(f"accuracy {right / total:.4f} of {total}")
    if accelerator.is_main_process:
        torch.save(accelerator.get_state_dict(model), folder / "weights.pt")
    accelerator.end_training()
    return right / total


class Steps:
    """The number of steps that the run has done."""

    done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


if __name__ == "__main__":
    train(Path(sys.argv[1]), float(sys.argv[2]))
