"""Give all ranks the same weights before a model is sharded, or its shards their weights afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Container
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from accelerate_core.plugin import AcceleratorView, PrepareError
from accelerate_fsdp2 import weights
from accelerate_fsdp2.mesh import sizes_of
from accelerate_fsdp2.settings import FullyShardedDataParallelPlugin

#: Where the weights of a model on the meta device come from: these tensors (on rank 0), rank 0, or a
#: checkpoint that the script loads later (None).
_Source = dict[str, torch.Tensor] | Literal["rank 0"] | None


class StartingWeights:
    """Remembers where the weights of models on the meta device come from.

    Args:
        options: whether modules are synchronised, and where shards are offloaded.
    """

    def __init__(self, options: FullyShardedDataParallelPlugin) -> None:
        self._options = options
        self._sources: weakref.WeakKeyDictionary[nn.Module, _Source] = weakref.WeakKeyDictionary()

    def __contains__(self, model: nn.Module) -> bool:
        """Return whether the shards of a model have no memory yet."""
        return model in self._sources

    def make_equal(
        self,
        accelerator: AcceleratorView,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        adopted: Container[nn.Module],
    ) -> None:
        """Give all ranks the same weights, or note where they come from if they are on the meta device.

        Args:
            adopted: models that were sharded before `prepare`.

        Raises:
            PrepareError: the ranks prepare different models, or only some ranks of a sharded model have
                weights.
        """
        if accelerator.num_processes == 1 and not weights.on_meta(model):
            weights.move_if_needed(model, accelerator.device)
            return
        weights.check_models(model, group)
        on_meta = weights.on_meta(model)
        # Whether any rank has it on meta, whether any has not, and whether rank 0 has.
        flags = [on_meta, not on_meta, on_meta and accelerator.is_main_process]
        found = torch.tensor(flags, dtype=torch.int32, device=accelerator.device)
        some, not_all, first = accelerator.communicator.reduce(found, "max").tolist()
        if (some and not not_all) or (first and model not in adopted):
            self._sources[model] = None
        elif some and model in adopted:
            raise PrepareError(
                f"{type(model).__name__} is already sharded, but some ranks have it on the meta "
                "device. Load its weights on all ranks, or on none and call load_state."
            )
        elif some:
            held = weights.take_off(model)
            self._sources[model] = held if accelerator.is_main_process else "rank 0"
        elif self._options.sync_module_states is False:
            weights.check_alike(model, group)
            weights.move_if_needed(model, accelerator.device)
        else:
            if accelerator.device.type != "cpu" and model not in adopted:
                model.to(accelerator.device)
            weights.broadcast_whole(model, group)

    def materialise(self, accelerator: AcceleratorView, model: nn.Module) -> None:
        """Allocate the shards of a model that was on the meta device, and fill them."""
        source = self._sources.pop(model)
        offload = self._options.offload_policy(accelerator.device)
        device = torch.device("cpu") if hasattr(offload, "pin_memory") else accelerator.device
        if source is None:
            weights.fill_with_nan(model, device)
            accelerator.warn_once(
                f"{type(model).__name__} was on the meta device on every rank, so it has no "
                "weights yet. Its shards are filled with NaN until you call load_state."
            )
            return
        model.to_empty(device=device)
        held = source if isinstance(source, dict) else None
        weights.fill_from_rank_0(model, held, sizes_of(accelerator), accelerator.device)
