"""Train adapters on frozen quantized weights, then save, resume and export.

Arguments: the kind, the output file.

"nf4" weights are sharded. "int8" weights, which torchao cannot split, stay whole on each rank, as `prepare`
warns.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

from accelerate_core import Accelerator, ParallelismConfig
from accelerate_core.errors import CheckpointError
from accelerate_core.utils import FullyShardedDataParallelPlugin, set_seed

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


class FrozenNF4(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(to_nf4(weight, 64, 256), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear_nf4(x, self.weight)


class LoRA(nn.Module):
    def __init__(self, inputs: int, outputs: int, kind: str) -> None:
        super().__init__()
        plain = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        self.base: nn.Module = FrozenNF4(plain.weight.data) if kind == "nf4" else plain
        self.a = nn.Parameter(torch.randn(4, inputs) * 0.1)
        self.b = nn.Parameter(torch.zeros(outputs, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x @ self.a.t()) @ self.b.t()


def inner(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors in which a rank holds a weight."""
    local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    if hasattr(local, "__tensor_flatten__"):
        return [one for n in local.__tensor_flatten__()[0] for one in inner(getattr(local, n))]
    return [local]


def resumes(
    accelerator: Accelerator,
    bases: list[Any],
    generator: torch.Generator,
    step: Callable[[], float],
    folder: Path,
) -> bool:
    """Return whether a run continues as it was saved, after its frozen weights were overwritten."""
    accelerator.save_state(str(folder))
    at = generator.get_state()
    saved = [[one.clone() for one in inner(base)] for base in bases]
    expected = [step(), step()]
    for base in bases:
        for one in inner(base):
            one.zero_()
    generator.set_state(at)
    accelerator.load_state(str(folder))
    found = [one for base in bases for one in inner(base)]
    restored = all(map(torch.equal, found, (one for olds in saved for one in olds)))
    return restored and [step(), step()] == expected


def refused(accelerator: Accelerator, model: nn.Module, folder: Path) -> str:
    """Return the error with which `save_model` refuses quantized weights on this rank."""
    try:
        accelerator.save_model(model, str(folder))
    except CheckpointError as error:
        return str(error)
    raise AssertionError(f"save_model wrote {sorted(folder.iterdir())}")


def main(kind: str, out: Path) -> None:
    set_seed(0)
    layers = [LoRA(256, 512, kind), nn.ReLU(), LoRA(512, 256, kind)]
    net: Any = nn.Sequential(*layers, nn.Linear(256, 8).requires_grad_(False))
    if kind == "int8":
        quantize_(net, Int8WeightOnlyConfig(), filter_fn=lambda _, name: name.endswith("base"))
    options: dict[str, Any] = {}
    if WORLD > 1:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin()
        options["parallelism_config"] = ParallelismConfig(dp_shard_size=WORLD)
    accelerator = Accelerator(cpu=True, **options)
    trained = [one for one in net.parameters() if one.requires_grad]
    model, adam = accelerator.prepare(net, torch.optim.AdamW(trained, lr=1e-2))
    bases = [model[0].base.weight, model[2].base.weight]
    before = [[one.clone() for one in inner(base)] for base in bases]
    generator = torch.Generator().manual_seed(1)

    def step() -> float:
        x, y = (
            torch.randn(8, 256, generator=generator),
            torch.randint(0, 8, (8,), generator=generator),
        )
        mine = slice(accelerator.process_index, None, WORLD)
        loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        adam.step()
        adam.zero_grad()
        return float(accelerator.reduce(loss.detach(), "mean"))

    losses = [step() for _ in range(8)]
    unchanged = all(
        torch.equal(one, two)
        for base, olds in zip(bases, before, strict=True)
        for one, two in zip(inner(base), olds, strict=True)
    )
    adapters = [
        (one.full_tensor() if isinstance(one, DTensor) else one).detach().flatten().tolist()
        for one in (model[0].a, model[0].b, model[2].a, model[2].b)
    ]
    result = {"resumed": resumes(accelerator, bases, generator, step, out.with_suffix(""))}
    result["refused"] = refused(accelerator, model, out.with_suffix(".model"))
    state = accelerator.get_state_dict(model)
    size = sum(one.untyped_storage().nbytes() for base in bases for one in inner(base))
    accelerator.end_training()
    if accelerator.is_main_process:
        assert {"0.a", "0.base.weight"} <= state.keys()
        result |= {"losses": losses, "adapters": adapters, "unchanged": unchanged, "bytes": size}
        out.write_text(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]))
