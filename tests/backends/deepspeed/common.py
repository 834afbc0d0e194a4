"""Helpers of the DeepSpeed workers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cpu_has_fp16  # noqa: F401
import torch
from worker import PG_TIMEOUT

from accelerate_core import Accelerator
from accelerate_deepspeed import DeepSpeedPlugin

sys.path.append(str(Path(__file__).parents[1] / "fsdp2"))
torch.set_num_threads(1)
#: Keeps the process group alive, so that each case can create its own Accelerator.
KEPT = Accelerator(cpu=True, backend="deepspeed", process_group_timeout=PG_TIMEOUT)

FIELDS = DeepSpeedPlugin.__dataclass_fields__


def speed(config: Any = None, **options: Any) -> Accelerator:
    """Return an Accelerator. Options that are fields of the DeepSpeed plugin are passed to it."""
    fields = {name: options.pop(name) for name in list(options) if name in FIELDS}
    steps = options.pop("steps", None)
    if steps is not None:
        options["gradient_accumulation_steps"] = steps
    return Accelerator(
        cpu=True,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config, **fields),
        process_group_timeout=PG_TIMEOUT,
        **options,
    )


def whole(accelerator: Accelerator, model: Any) -> dict[str, torch.Tensor]:
    """Return the whole weights on every rank."""
    return accelerator.communicator.broadcast_object(
        {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    )
