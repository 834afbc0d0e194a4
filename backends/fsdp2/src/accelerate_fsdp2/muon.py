"""`torch.optim.Muon` on sharded matrices.

Muon orthogonalises the update of each matrix, which needs the whole matrix. torch would compute it on
shards, in bf16, and add up partial products, so the result would depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from accelerate_core.plugin import ParallelismConfig
from accelerate_fsdp2.weights import local_part


@contextmanager
def whole_matrices(config: ParallelismConfig, rank: int) -> Iterator[None]:
    """Orthogonalise whole matrices while Muon steps inside the block.

    One matrix at a time is gathered on all ranks. Each rank computes it and keeps its part. Momentum
    stays sharded.
    """
    from torch.optim import _muon as module

    _muon: Any = module

    orthogonalise: Callable[..., torch.Tensor] = _muon._zeropower_via_newtonschulz

    def on_whole(update: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(update, DTensor):
            return orthogonalise(update, *args, **kwargs)
        made = orthogonalise(update.full_tensor(), *args, **kwargs)
        placements = [Replicate() if isinstance(p, Partial) else p for p in update.placements]
        like = update if tuple(placements) == update.placements else None
        if like is None:
            like = update.redistribute(placements=placements)
        part = local_part(made, like, config, rank).contiguous()
        return DTensor.from_local(
            part,
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=made.shape,
            stride=made.stride(),
        )

    _muon._zeropower_via_newtonschulz = on_whole
    try:
        yield
    finally:
        _muon._zeropower_via_newtonschulz = orthogonalise
