"""The random states of ranks that read the same samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from accelerate_checkpoint import capture_rng_state, restore_rng_state
from accelerate_core.plugin import AcceleratorView
from accelerate_fsdp2.mesh import mesh_of, sizes_of


def align(accelerator: AcceleratorView) -> None:
    """Give ranks that read the same samples the same random states.

    They need the same dropout in layers that they share, and the same data augmentation.
    """
    config, mesh = sizes_of(accelerator), mesh_of(accelerator)
    for name in config.non_dp_dim_names:
        own = capture_rng_state([accelerator.device])
        sent: list[Any] = [own]
        dist.broadcast_object_list(sent, group_src=0, group=mesh[name].get_group())
        if not _alike(own, sent[0]):
            restore_rng_state(sent[0])
            accelerator.warn_once(
                f"Ranks of the same {name} group had different random states. They now use those "
                "of the group's first rank. To avoid this, call set_seed(seed) without "
                "device_specific.",
                every_rank=True,
            )


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        for key, value in one.items()
        if key != "devices"
    )
