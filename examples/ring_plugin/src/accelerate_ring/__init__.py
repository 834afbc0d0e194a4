"""An example of a third-party backend, which averages gradients around a ring of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from accelerate_core.plugin import (
    AcceleratorView,
    Backend,
    BackendSettings,
    Claim,
    Request,
    option,
    settings,
)

__all__ = ["RingBackend", "RingPlugin"]


@settings(argument="ring_plugin")
class RingPlugin(BackendSettings):
    """Settings of the ring."""

    chunk_mb: int = option(default=25, help="size of a chunk in MiB", ge=1)


class RingBackend(Backend):
    """Replicates models, and averages gradients around the ring before clipping or a step."""

    name = "ring"
    api_version = (1, 0)
    reduces_gradients = "step"
    supports = {"accepts": ("autocast",), "no_sync": True, "join": False}
    Settings = RingPlugin

    def __init__(self, settings: Any = None, handlers: Sequence[Any] = ()) -> None:
        super().__init__(settings or RingPlugin(), handlers)
        self._averaged: set[int] = set()

    @classmethod
    def detect(cls, request: Request) -> Claim | None:
        """Claim the run if the argument or the environment variable is set."""
        if request.arguments.get("ring_plugin") is not None:
            return Claim(60, "ring_plugin was passed")
        return (
            Claim(50, "ACCELERATE_USE_RING is set")
            if request.env_flag("ACCELERATE_USE_RING")
            else None
        )

    def distributed_type(self, accelerator: AcceleratorView) -> str:
        """Return `RING`."""
        return "RING" if accelerator.num_processes > 1 else "NO"

    def prepare_model(
        self, accelerator: AcceleratorView, model: torch.nn.Module
    ) -> torch.nn.Module:
        """Copy the weights of rank 0 to every rank."""
        if accelerator.num_processes > 1:
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor.detach(), src=0)
        return model

    def backward(
        self, accelerator: AcceleratorView, loss: torch.Tensor, kwargs: dict[str, Any]
    ) -> None:
        """Run the backward. The new gradients are not averaged yet."""
        self._averaged.clear()
        super().backward(accelerator, loss, kwargs)

    def clip_grad(
        self,
        accelerator: AcceleratorView,
        parameters: Sequence[torch.Tensor],
        max_norm: float | None,
        norm_type: float,
        clip_value: float | None,
    ) -> Any:
        """Average first, because clipping needs the norm of the averaged gradients."""
        self._average(accelerator, parameters)
        return super().clip_grad(accelerator, parameters, max_norm, norm_type, clip_value)

    def optimizer_step(
        self, accelerator: AcceleratorView, optimizer: Any, closure: Callable[[], Any] | None
    ) -> bool:
        """Average the gradients that clipping has not averaged yet, and step."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]

        def averaging() -> Any:
            loss = closure() if closure else None
            self._average(accelerator, parameters)
            return loss

        if closure is None:
            averaging()
        return super().optimizer_step(accelerator, optimizer, closure and averaging)

    def _average(self, accelerator: AcceleratorView, parameters: Sequence[torch.Tensor]) -> None:
        if accelerator.num_processes == 1:
            return
        asked = [p for p in parameters if id(p) not in self._averaged]
        used = torch.tensor([float(p.grad is not None) for p in asked], device=accelerator.device)
        around_the_ring(used)
        waiting = [p for p, ranks in zip(asked, used.tolist(), strict=True) if ranks]
        for parameter in waiting:
            if parameter.grad is None:  # only other ranks have used this parameter
                parameter.grad = torch.zeros_like(parameter)
        limit = self.settings.chunk_mb * 2**20
        while waiting:
            chunk, size = [], 0
            while waiting and (not chunk or size + waiting[0].nbytes <= limit):
                chunk.append(waiting.pop(0))
                size += chunk[-1].nbytes
            gradients = [p.grad for p in chunk if p.grad is not None]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            around_the_ring(flat)
            flat /= accelerator.num_processes
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
            self._averaged.update(id(parameter) for parameter in chunk)


def around_the_ring(flat: torch.Tensor) -> None:
    """Sum a flat tensor over all ranks in place, by passing tensors on n - 1 times.

    Every rank adds the same tensors in rank order, so all ranks get bitwise equal results.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    pieces = [torch.empty_like(flat) for _ in range(size)]
    pieces[rank].copy_(flat)
    for hop in range(size - 1):
        outgoing, incoming = pieces[(rank - hop) % size], pieces[(rank - hop - 1) % size]
        work = [
            dist.P2POp(dist.isend, outgoing, (rank + 1) % size),
            dist.P2POp(dist.irecv, incoming, (rank - 1) % size),
        ]
        for request in dist.batch_isend_irecv(work):
            request.wait()
    flat.copy_(torch.stack(pieces).sum(0))
