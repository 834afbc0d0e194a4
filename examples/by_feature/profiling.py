"""Profile a few steps, and write one trace per rank for Perfetto or chrome://tracing.

accelerate-core launch --num_processes 2 examples/by_feature/profiling.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from digits import digits, network
from torch.utils.data import DataLoader

from accelerate_core import Accelerator, ProfileKwargs


def main(folder: Path) -> dict[str, object]:
    profile = ProfileKwargs(activities=["cpu"], record_shapes=True, output_trace_dir=str(folder))
    accelerator = Accelerator(kwargs_handlers=[profile])
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(digits()[0], batch_size=64)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with accelerator.profile() as profiler:
        for step, (images, labels) in enumerate(loader):
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                break
    operators = {event.key for event in profiler.key_averages()}
    table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=5)
    accelerator.print(table)
    accelerator.wait_for_everyone()
    traces = sorted(path.name for path in folder.glob("*.json"))
    accelerator.end_training()
    return {"traces": traces, "linear": "aten::linear" in operators or "aten::addmm" in operators}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "profiling_output"))
