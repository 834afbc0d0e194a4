"""Helpers of the FSDP2 workers."""

from __future__ import annotations

from typing import Any

import torch
from gpt import PLAN
from torch import nn
from torch.distributed.tensor import DTensor
from worker import PG_TIMEOUT

from accelerate_core import Accelerator, ParallelismConfig
from accelerate_core.utils import (
    TorchTensorParallelConfig,
)
from accelerate_fsdp2 import FullyShardedDataParallelPlugin
from accelerate_fsdp2.testing import enable_cpu_ring_attention

torch.set_num_threads(1)
enable_cpu_ring_attention()
KEPT = Accelerator(cpu=True, backend="fsdp2", process_group_timeout=PG_TIMEOUT)


def fsdp(sizes: dict[str, int] | None = None, plan: Any = None, **options: Any) -> Accelerator:
    """Return an Accelerator. Options that are fields of the FSDP plugin are passed to the plugin."""
    plugin = {
        name: options.pop(name)
        for name in list(options)
        if name in FullyShardedDataParallelPlugin.__dataclass_fields__
    }
    config = None
    if sizes:
        handler = TorchTensorParallelConfig(plan=PLAN if plan is None else plan)
        config = ParallelismConfig(
            **{f"{name}_size": size for name, size in sizes.items()}, tp_handler=handler
        )
    return Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(**plugin),
        parallelism_config=config,
        process_group_timeout=PG_TIMEOUT,
        **options,
    )


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }
