"""Train a model that Transformers shards while it loads it, and compare it with one process.

This is the training of `parity_llama_worker.py` and `parity_gpt2_worker.py`, with the arguments of
`parity_worker.py`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers.integrations.accelerate
from parity_worker import BATCH, CYCLE, STEPS
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from accelerate_core import Accelerator, ParallelismConfig
from accelerate_core.utils import set_seed

# Transformers only checks that the distribution `accelerate` is installed.
transformers.integrations.accelerate.is_accelerate_available = lambda *args: True

LENGTH, VOCABULARY = 12, 64


def load(new: Any, plans: dict[str, Any], sizes: dict[str, int] | None) -> Any:
    """Save a model with random weights, and load it with these sizes, or whole with None.

    Args:
        new: returns the model.
        plans: options of `DistributedConfig` that this kind of model needs.
    """
    options: dict[str, Any] = {"attn_implementation": "eager"}
    if sizes is not None:
        options["distributed_config"] = DistributedConfig(
            fsdp_size=sizes.get("dp_shard", 1), tp_size=sizes.get("tp", 1), **plans
        )
    with tempfile.TemporaryDirectory() as folder:
        set_seed(0)
        new().save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, **options)


def train(model: Any, sizes: dict[str, int] | None) -> dict[str, Any]:
    """Take eight steps with accumulation and clipping; with None, without an Accelerator."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(0, VOCABULARY, (STEPS * CYCLE * BATCH, LENGTH), generator=generator)
    adam: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if sizes is None:
        return plain(model, adam, rows)
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(**{f"{name}_size": n for name, n in sizes.items()}),
        gradient_accumulation_steps=CYCLE,
        process_group_timeout=60,
    )
    batches: Any = DataLoader(TensorDataset(rows), BATCH // sizes.get("dp_shard", 1))
    model, adam, batches = accelerator.prepare(model, adam, batches)
    losses, norms, cycle = [], [], []
    for (batch,) in batches:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            adam.step()
            adam.zero_grad()
        cycle.append(float(accelerator.reduce(loss.detach(), "mean")))
        if len(cycle) == CYCLE:
            losses.append(sum(cycle) / CYCLE)
            cycle = []
    accelerator.end_training()
    return {"losses": losses, "norms": norms}


def plain(model: Any, adam: Any, rows: torch.Tensor) -> dict[str, Any]:
    losses, norms, cycle = [], [], []
    for batch in rows.split(BATCH):
        loss = model(input_ids=batch, labels=batch).loss
        (loss / CYCLE).backward()
        cycle.append(float(loss.detach()))
        if len(cycle) == CYCLE:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            adam.step()
            adam.zero_grad()
            losses.append(sum(cycle) / CYCLE)
            cycle = []
    return {"losses": losses, "norms": norms}


def main(new: Any, plans: dict[str, Any]) -> None:
    """Run with the arguments of the command line. Rank 0 writes the result."""
    torch.set_num_threads(1)
    sizes, out = json.loads(sys.argv[1]), Path(sys.argv[3])
    result = train(load(new, plans, sizes), sizes)
    if int(os.environ.get("RANK", "0")) == 0:
        out.write_text(json.dumps(result))
