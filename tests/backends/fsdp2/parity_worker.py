"""Train eight optimizer steps with accumulation and clipping, and write losses and norms as JSON.

Arguments: sizes of the mesh (JSON), options of the Accelerator (JSON), and the output file. With
sizes `null`, train in one process with plain PyTorch. For a backend without a mesh, pass sizes `{}`
and the option `backend`.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, LENGTH, PLAN, loss_of, text
from torch.utils.data import DataLoader, TensorDataset

from accelerate_core import Accelerator, ParallelismConfig
from accelerate_core.utils import TorchTensorParallelConfig, set_seed

STEPS, CYCLE, BATCH = 8, 2, 8


def train(sizes: dict[str, int] | None, **options: Any) -> dict[str, Any]:
    """Train with a mesh of these sizes, or with None, in one process with plain PyTorch."""
    set_seed(0)
    model: Any = GPT()
    rows = text(STEPS * CYCLE * BATCH)
    if sizes is None:
        return plain(model, rows)
    config = None
    if sizes:
        config = ParallelismConfig(
            **{f"{name}_size": size for name, size in sizes.items()},
            tp_handler=TorchTensorParallelConfig(plan=PLAN),
        )
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=config,
        gradient_accumulation_steps=CYCLE,
        process_group_timeout=60,
        **options,
    )
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = config.data_parallel_size if config else accelerator.num_processes
    loader = DataLoader(TensorDataset(rows), BATCH // parts)
    model, adam, loader = accelerator.prepare(model, adam, loader)
    losses, norms, part = [], [], []
    for (batch,) in loader:
        tokens, labels = batch[:, :-1].clone(), batch[:, 1:].clone()
        places = torch.arange(LENGTH).expand_as(tokens).clone()
        shared = accelerator.maybe_context_parallel(
            buffers=[tokens, places, labels], buffer_seq_dims=[1, 1, 1]
        )
        with shared, accelerator.accumulate(model):
            loss = loss_of(model, tokens, places, labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            adam.step()
            adam.zero_grad()
        part.append(float(accelerator.reduce(loss.detach(), "mean")))
        if len(part) == CYCLE:
            losses.append(sum(part) / CYCLE)
            part = []
    accelerator.end_training()
    return {"losses": losses, "norms": norms}


def plain(model: Any, rows: torch.Tensor) -> dict[str, Any]:
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for step in range(STEPS):
        part = []
        for micro in range(CYCLE):
            start = (step * CYCLE + micro) * BATCH
            batch = rows[start : start + BATCH]
            places = torch.arange(LENGTH).expand(BATCH, LENGTH)
            loss = loss_of(model, batch[:, :-1], places, batch[:, 1:])
            (loss / CYCLE).backward()
            part.append(float(loss.detach()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        adam.step()
        adam.zero_grad()
        losses.append(sum(part) / CYCLE)
    return {"losses": losses, "norms": norms}


def main() -> None:
    if prelude := os.environ.get(
        "PARITY_PRELUDE"
    ):  # a script that makes the case run on this machine
        runpy.run_path(prelude)
    sizes, options, out = json.loads(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    if (sizes or {}).get("cp", 1) > 1:
        from accelerate_fsdp2.testing import enable_cpu_ring_attention

        enable_cpu_ring_attention()
    result = train(sizes, **options)
    if int(os.environ.get("RANK", "0")) == 0:
        out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
