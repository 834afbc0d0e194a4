"""Train with DeepSpeed on one rank; print the losses and the engine's class as JSON.

`gpu_deepspeed_worker.py STAGE PRECISION DEVICE`
"""

from __future__ import annotations

import json
import sys

import torch
from small import accelerate, batches, net, sgd, train

from accelerate_core.utils import DeepSpeedPlugin


def main(stage: int, precision: str, device: str) -> None:
    plugin = DeepSpeedPlugin(zero_stage=stage)
    on_cpu = device == "cpu"
    with accelerate(on_cpu, deepspeed_plugin=plugin, mixed_precision=precision) as accelerator:
        plugin.hf_ds_config.config["train_micro_batch_size_per_gpu"] = 32
        model = net()
        model, optimizer = accelerator.prepare(model, sgd(model))
        losses = train(accelerator, model, optimizer, batches(torch.device(device)))
        told = {"losses": losses, "engine": type(model).__name__}
        accelerator.print("TOLD" + json.dumps(told))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
