"""A run that is started several times, each time from the last checkpoint, until killed or finished.

Arguments: the layout (sizes and plugin options, JSON), the project folder, the total number of
micro-batches, and the micro-batch after which rank 1 kills itself while saving (0: never). Rank 0
appends the losses to a file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import cuda_on_cpu
import torch
from tiny import batches, tiny
from torch.utils.data import DataLoader
from worker import PG_TIMEOUT, RANK, Counter

from accelerate_core import Accelerator, MegatronLMPlugin, ParallelismConfig
from accelerate_core.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from accelerate_megatron import checkpoint

cuda_on_cpu.install()


def begin(layout: dict[str, Any], folder: Path) -> tuple[Accelerator, Any, Any, Any, Any, Counter]:
    warnings.filterwarnings("ignore", message=".*(all_gather_into|reduce_scatter)_tensor.*")
    sizes = {f"{name}_size": size for name, size in layout.pop("sizes").items()}
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        parallelism_config=ParallelismConfig(**sizes),
        megatron_lm_plugin=MegatronLMPlugin(**layout),
        project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=True),
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
        process_group_timeout=PG_TIMEOUT,
    )
    set_seed(3)
    model: Any = tiny("llama", layers=2)
    adam: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    decay: Any = torch.optim.lr_scheduler.ExponentialLR(adam, 0.95)
    loader: Any = DataLoader(batches(64), 8, shuffle=True)
    model, adam, decay, loader = accelerator.prepare(model, adam, decay, loader)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    return accelerator, model, adam, decay, loader, counter


def main(layout: dict[str, Any], folder: Path, until: int, kill: int) -> None:
    accelerator, model, adam, decay, loader, counter = begin(layout, folder)
    if any((folder / "checkpoints").glob("checkpoint_*")):
        accelerator.load_state()
    while counter.batches < until:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = accelerator.train_step(batch).loss
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                adam.step()
                decay.step()
                adam.zero_grad()
            counter.batches += 1
            mean = float(accelerator.reduce(loss.detach(), "mean"))
            if accelerator.is_main_process:
                with (folder / "losses.txt").open("a") as file:
                    file.write(f"{counter.batches} {mean!r}\n")
            if counter.batches == kill and RANK == 1:
                checkpoint.save = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
            if counter.batches % 5 == 0 or counter.batches in (kill, until):
                accelerator.save_state()  # sometimes in the middle of an accumulation cycle
            if counter.batches == until:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
