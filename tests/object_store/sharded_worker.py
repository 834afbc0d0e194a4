"""Two ranks, each on a simulated machine of its own, save a sharded model to a bucket and load it."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn
from worker import write_result

from accelerate_core import Accelerator
from accelerate_core.utils import FullyShardedDataParallelPlugin, ParallelismConfig, set_seed


def main(place: str, layout: str) -> None:
    """Save, change everything, load, and report which objects were fetched."""
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"
    sizes = {"dp_replicate_size": 2} if layout == "replicated" else {"dp_shard_size": 2}
    plugin = FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        project_dir=place,
        parallelism_config=ParallelismConfig(**sizes),
    )
    set_seed(3)
    net: Any = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))

    def step() -> None:
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
        accelerator.backward(model(x).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()

    def weights() -> list[torch.Tensor]:
        return [one.detach().full_tensor() for one in model.parameters()]

    step()
    accelerator.save_state("step_1")
    step()
    expected = weights()
    storage = accelerator.checkpointer.storage
    fetch = storage.fetch
    fetched: dict[str, int] = {}

    def counted(target: str, name: str, start: int, stop: int) -> bytes:
        fetched[name.partition("/")[2]] = fetched.get(name.partition("/")[2], 0) + stop - start
        return bytes(fetch(target, name, start, stop))

    storage.fetch = counted
    accelerator.load_state("step_1")
    step()
    same = all(torch.equal(one, two) for one, two in zip(weights(), expected, strict=True))
    write_result({"same": same, "fetched": fetched})
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
