"""A project that was written for Accelerate: `accelerate launch train.py OUT.json`."""

import json
import os
import sys

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, skip_first_batches
from accelerate.logging import get_logger
from accelerate.utils import (
    DataLoaderConfiguration,
    ProjectConfiguration,
    find_executable_batch_size,
)
from data import loaders

logger = get_logger(__name__)


def main():
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        log_with="tensorboard",
        project_config=ProjectConfiguration("runs", automatic_checkpoint_naming=True),
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    accelerator.init_trackers("digits", config={"lr": 0.01})
    found = {
        "processes": accelerator.num_processes,
        "precision": accelerator.mixed_precision,
        "type": str(accelerator.distributed_type),
        "variable": os.environ.get("ACCELERATE_MIXED_PRECISION"),
        "losses": [],
        "right": [],
    }

    @find_executable_batch_size(starting_batch_size=16)
    def run(batch_size):
        train, held_out = loaders(batch_size, seed=2)
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.02, epochs=3, steps_per_epoch=13
        )
        model, optimizer, train, held_out, schedule = accelerator.prepare(
            model, optimizer, train, held_out, schedule
        )
        accelerator.register_for_checkpointing(schedule)
        for epoch in range(3):
            model.train()
            batches = skip_first_batches(train, 3) if epoch == 1 else train
            for step, (images, labels) in enumerate(batches):
                with accelerator.accumulate(model):
                    loss = torch.nn.functional.cross_entropy(model(images), labels)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                found["losses"].append(accelerator.reduce(loss.detach(), "mean").item())
                accelerator.log({"loss": found["losses"][-1]}, step=len(found["losses"]))
                if epoch == 1 and step == 4:
                    accelerator.save_state()
            model.eval()
            right = rows = 0
            for images, labels in held_out:
                with torch.no_grad():
                    guessed = model(images).argmax(-1)
                guessed, labels = accelerator.gather_for_metrics((guessed, labels))
                right, rows = right + int((guessed == labels).sum()), rows + len(labels)
            found["right"].append([right, rows])
            logger.info("epoch %d: %d of %d", epoch, right, rows)
        accelerator.load_state("runs/checkpoints/checkpoint_0")
        found["restored"] = [p.double().norm().item() for p in model.parameters()]
        found["lr"] = schedule.get_last_lr()[0]
        accelerator.save_model(model, "final")

    run()
    accelerator.wait_for_everyone()
    found["files"] = sorted(os.listdir("final"))
    accelerator.end_training()
    if accelerator.is_main_process:
        with open(sys.argv[1], "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
