"""Memory of a rank after a step with FSDP2 and DDP, for a model of about 50 million parameters.

    python benchmarks/sharding.py

Each case runs in separate processes. The bytes of parameters, gradients and optimizer states are counted
exactly. The peak of resident memory also includes activations, buffers of collectives, and Python.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from harness import memory, torchrun
from rich.console import Console
from rich.progress import track
from rich.table import Table

CASES = [("ddp", 2), ("fsdp2", 2), ("fsdp2", 4)]
LIMITS = {("fsdp2", 2): 0.55, ("fsdp2", 4): 0.3}


def child(backend: str, out: Path) -> None:
    import torch
    from torch import nn

    from accelerate_core import Accelerator

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, backend=backend)
    torch.manual_seed(0)
    layers = nn.ModuleList(
        nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True) for _ in range(7)
    )

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model: Any = Net()
    count = sum(parameter.numel() for parameter in model.parameters())
    adam: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, adam = accelerator.prepare(model, adam)
    for _ in range(2):
        accelerator.backward(model(torch.randn(2, 16, 768)).square().mean())
        adam.step()
    held = 0
    for parameter in model.parameters():
        for tensor in (parameter, parameter.grad, *adam.state[parameter].values()):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            held += local.numel() * local.element_size()
    if accelerator.is_main_process:
        peak = round(memory("VmHWM") * 1e6)
        out.write_text(json.dumps({"parameters": count, "held": held, "peak": peak}))
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child[0], Path(options.child[1]))
        return
    results: dict[tuple[str, int], dict[str, int]] = {}
    for backend, ranks in track(CASES, "training"):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "result.json")
            command = [*torchrun(ranks), __file__, "--child", backend, str(out)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{backend}: {done.stderr[-3000:]}")
            results[backend, ranks] = json.loads(out.read_text())
    base = results["ddp", 2]
    table = Table("backend", "ranks", "held by a rank", "relative to DDP", "peak resident")
    failed = False
    for (backend, ranks), row in results.items():
        ratio = row["held"] / base["held"]
        limit = LIMITS.get((backend, ranks))
        failed |= limit is not None and ratio > limit
        text = f"{ratio:.3f}" + (f" (limit {limit})" if limit else "")
        table.add_row(
            backend, str(ranks), f"{row['held'] / 1e6:.0f} MB", text, f"{row['peak'] / 1e6:.0f} MB"
        )
    Console().print(f"{base['parameters'] / 1e6:.1f} million parameters, AdamW, fp32")
    Console().print(table)
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
