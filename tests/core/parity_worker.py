"""Train with accelerate-core. Arguments select the runs, such as `fp32`, `fp16` or `compiled`."""

from __future__ import annotations

import sys
from typing import Any

from digits import loader, make_net
from plain import ACCUMULATION, BATCH, MAX_NORM, STEPS, make_optimizer
from torch.nn.functional import cross_entropy
from worker import PG_TIMEOUT, SIZE, flat, write_result

from accelerate_core import Accelerator
from accelerate_core.utils import DataLoaderConfiguration, TorchDynamoPlugin

RUNS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "split": {"dataloader_config": DataLoaderConfiguration(split_batches=True)},
    "fp16": {"mixed_precision": "fp16"},
    "bf16": {"mixed_precision": "bf16"},
    "whole": {"dynamo_backend": "aot_eager"},
    "regional": {
        "dynamo_plugin": TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)
    },
    "bf16_whole": {"mixed_precision": "bf16", "dynamo_backend": "aot_eager"},
}


def graphs() -> int:
    """Return the number of frames that torch has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["frames"]["ok"] if dynamo else 0


def train(**arguments: Any) -> dict[str, list[float]]:
    before = graphs()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATION,
        process_group_timeout=PG_TIMEOUT,
        **arguments,
    )
    model = make_net()
    split = accelerator.split_batches
    data = loader(STEPS * ACCUMULATION * BATCH * SIZE, BATCH * (SIZE if split else 1))
    optimizer, scheduler = make_optimizer(model, STEPS * (1 if split else SIZE))
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    history: dict[str, list[float]] = {"losses": [], "norms": [], "rates": [], "scales": []}
    for x, y in data:
        with accelerator.accumulate(model):
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                history["norms"].append(norm.item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        history["losses"].append(accelerator.reduce(loss.detach(), "mean").item())
        if accelerator.sync_gradients:
            history["rates"].append(scheduler.get_last_lr()[0])
            scaler = accelerator.scaler
            history["scales"].append(scaler.get_scale() if scaler else 1.0)
    history["weights"] = flat(model).tolist()
    history["graphs"] = [graphs() - before]
    accelerator.end_training()
    return history


if __name__ == "__main__":
    write_result({name: train(**RUNS[name]) for name in sys.argv[1:]})
