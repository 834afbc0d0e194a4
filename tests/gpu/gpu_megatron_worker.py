"""Train with megatron-core on one rank and with plain Transformers; print both losses as JSON.

`gpu_megatron_worker.py DISTRIBUTED PRECISION DEVICE`
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parents[1] / "backends" / "megatron"
sys.path.append(str(HERE))
if sys.argv[3] == "cpu":  # a rehearsal
    runpy.run_path(str(HERE / "cuda_on_cpu.py"))["install"]()

from small import accelerate  # noqa: E402
from tiny import batches, tiny  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from accelerate_core.utils import MegatronLMPlugin  # noqa: E402


def made() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = tiny()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def plain(data: Any, device: str) -> list[float]:
    model, optimizer = made()
    model.to(device)  # in place
    losses = []
    for batch in data:
        loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(distributed: str, precision: str, device: str) -> None:
    data = DataLoader(batches(64), 8)
    expected = plain(data, device)
    plugin = MegatronLMPlugin(num_micro_batches=2, use_distributed_optimizer=distributed == "yes")
    arguments: dict[str, Any] = {"megatron_lm_plugin": plugin, "mixed_precision": precision}
    with accelerate(device == "cpu", **arguments) as accelerator:
        model, optimizer, loader = accelerator.prepare(*made(), data)
        losses = []
        for batch in loader:
            losses.append(float(accelerator.train_step(batch).loss))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print("TOLD" + json.dumps({"losses": losses, "expected": expected}))


if __name__ == "__main__":
    main(*sys.argv[1:])
