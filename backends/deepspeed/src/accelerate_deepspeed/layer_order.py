"""A check that all ranks use the same layers in the same order, as stage 3 requires.

Stage 3 gathers a layer's parameters when a forward or backward reaches it. If ranks reach different
layers, their parts of different parameters are mixed, or the ranks wait for each other forever.
"""

from __future__ import annotations

import itertools
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate_core.plugin import AcceleratorView, DistributedOperationException, warn

#: The first recordings in which each layer is compared. Models whose layers vary are recorded again and
#: again, so later recordings are only compared where they begin, and by DeepSpeed at the next forward.
_COMPARED_RECORDINGS = 4
#: Seconds after which a rank that waits for the others' answers says so.
_PATIENCE = 10.0
_POLL = 0.005

_numbers = itertools.count()


class LayerOrder:
    """Compares the layers that ranks reach, without any work in steps that repeat the recorded order.

    DeepSpeed records the order of layers in the first forward and backward. Meanwhile, each layer is
    compared with those of other ranks before its parameters are gathered. If a rank later reaches
    another layer than the recorded one, it asks the others through the store whether they do too.

    Args:
        offload: the `DeepSpeedZeRoOffload` of an engine.
        model: the engine's module.
    """

    def __init__(self, accelerator: AcceleratorView, offload: Any, model: nn.Module) -> None:
        self._coordinator = offload.get_param_coordinator()
        self._model = type(model).__name__
        self._device = accelerator.device
        #: Module -> its number and name, which are equal on all ranks.
        self._layers = {
            module: (number, name or self._model)
            for number, (name, module) in enumerate(model.named_modules())
        }
        timeout: timedelta = accelerator.group_timeout or dist.default_pg_timeout
        self._timeout, self._patience = timeout.total_seconds(), _PATIENCE
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"accelerate/layer_order/{next(_numbers)}", store)
        self._questions = 0
        self._recordings = 0
        self._left = False
        self._fetch = self._coordinator.fetch_sub_module
        self._invalidate = self._coordinator._invalidate_trace
        vars(self._coordinator)["_invalidate_trace"] = self._leave
        self._begin()

    def _begin(self) -> None:
        self._recordings += 1
        disable: Any = torch.compiler.disable
        vars(self._coordinator)["fetch_sub_module"] = disable(self._compare_and_fetch)

    def _leave(self) -> None:
        """Begin again, because this rank has left the recorded order."""
        self._invalidate()
        self._left = True
        self._begin()

    def _compare_and_fetch(self, module: nn.Module, forward: bool) -> None:
        if self._coordinator.is_complete_trace():
            # From now on, DeepSpeed's own method runs.
            vars(self._coordinator).pop("fetch_sub_module", None)
        elif self._left:
            self._left = False
            self._ask(self._described(module, forward))
        elif self._recordings <= _COMPARED_RECORDINGS:
            self._compare(module, forward)
        self._fetch(module, forward)

    def _described(self, module: nn.Module, forward: bool) -> str:
        _, name = self._layers.get(module, (-1, type(module).__name__))
        return f"{name} in the {'forward' if forward else 'backward'}"

    def _compare(self, module: nn.Module, forward: bool) -> None:
        """Compare a layer with those that the other ranks are about to use."""
        from deepspeed.utils import z3_leaf_module

        if module not in self._layers or (z3_leaf_module(module) and not forward):
            return  # several threads may reach a block of experts in the backward
        number = 2 * self._layers[module][0] + forward
        limits = torch.tensor([number, -number], device=self._device)
        dist.all_reduce(limits, dist.ReduceOp.MAX)
        largest, smallest = limits.tolist()
        if largest == -smallest:
            return
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, self._described(module, forward))
        layers = {name: names.index(name) for name in names}
        raise self._error(", ".join(f"rank {rank} uses {name}" for name, rank in layers.items()))

    def _ask(self, layer: str) -> None:
        """Wait until all ranks have left the recorded order, and fail unless they go to the same layer."""
        self._questions += 1
        first, count, answer = (f"{self._questions}/{key}" for key in ("first", "count", "answer"))
        own_layer = f"rank {dist.get_rank()} uses {layer}"
        first_layer = self._store.compare_set(first, "", own_layer).decode()
        if first_layer.partition(" uses ")[2] != layer:
            self._store.set(answer, f"{first_layer}, {own_layer}")
        elif self._store.add(count, 1) == dist.get_world_size():
            self._store.set(answer, "same")
        started, warned = time.monotonic(), False
        while not self._store.check([answer]):
            waited = time.monotonic() - started
            layers = f"{own_layer}, and other ranks still use the layers of earlier steps"
            if waited > self._timeout:
                raise self._error(layers)
            if waited > self._patience and not warned:
                warned = True
                warn(f"{self._text(layers)} It waits for the other ranks.")
            time.sleep(_POLL)
        reply = self._store.get(answer).decode()
        if reply != "same":
            raise self._error(reply)

    def _error(self, difference: str) -> DistributedOperationException:
        return DistributedOperationException(self._text(difference))

    def _text(self, difference: str) -> str:
        return (
            f"Ranks use different layers of {self._model}: {difference}. Stage 3 of DeepSpeed gathers the "
            "parameters of each layer on all ranks, so all ranks must use the same layers in the same "
            "order. Name the classes of modules that choose among layers in transformer_moe_cls_names, let "
            "all ranks take the same branch, or use the backend ddp."
        )
