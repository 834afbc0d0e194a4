"""`Communicator`: what one group of processes can say to each other, on flat tensors.

It adds to a backend's talk hooks only what holds for all of them: a group of one is the identity,
inputs are not changed, and the mean of integers is a float.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from accelerate_core.torch_talk import ReduceOp, Scope, TorchTalk

__all__ = ["Communicator", "ReduceOp", "Scope", "TalkHooks"]


@runtime_checkable
class TalkHooks(Protocol):
    """The owner hooks a communicator calls, bound to their accelerator already.

    Tensors are 1-d, contiguous and on the device of the backend. `scope` says which processes
    take part: "data" (those with different samples), "loss" (those over which a loss is summed)
    or "world". `src` is a rank within that scope. Results may share memory with nothing but the
    input, and only `reduce` and `broadcast` may write into theirs.
    """

    def gather(self, tensor: torch.Tensor, scope: Scope) -> torch.Tensor:
        """Return the tensors [k] of all ranks as one [size * k], in rank order."""

    def reduce(self, tensor: torch.Tensor, op: ReduceOp, scope: Scope) -> torch.Tensor:
        """Return the elementwise sum, mean (of integers never), max or min over the ranks."""

    def broadcast(self, tensor: torch.Tensor, src: int, scope: Scope) -> torch.Tensor:
        """Return the tensor of rank `src`; the others give one of equal size and dtype."""

    def scatter(
        self,
        parts: Sequence[torch.Tensor] | None,
        like: torch.Tensor,
        src: int,
        scope: Scope,
    ) -> torch.Tensor:
        """Return this rank's one of the `parts` that rank `src` holds; all are of `like`'s size."""

    def all_to_all(self, tensor: torch.Tensor, scope: Scope) -> torch.Tensor:
        """Send the i-th of `size` equal pieces to rank i; return the pieces received, in order."""

    def barrier(self, scope: Scope) -> None:
        """Return once every rank has called this."""

    def gather_object(self, obj: Any, scope: Scope) -> list[Any]:
        """Return the picklable objects of all ranks, in rank order."""

    def broadcast_object(self, obj: Any, src: int, scope: Scope) -> Any:
        """Return the picklable object of rank `src`."""

    def scatter_object(self, objs: Sequence[Any] | None, src: int, scope: Scope) -> Any:
        """Return this rank's one of the objects that rank `src` holds."""


class Communicator:
    """The processes of one scope, as seen by one of them.

    Args:
        rank: index of this process among those of the scope.
        size: number of processes of the scope. With 1 every method is the identity.
        device: where the tensors of a collective have to be.
        hooks: the backend's talk hooks.
        scope: which processes take part, "world" by default.
        debug: compare the shapes of all ranks before a collective on nested structures, at the
            price of one more collective each, and raise instead of letting the group break.
        open_group: makes a process group for tensors in host memory, of the given ranks of the
            world (None: all); may return None where there is no such group.

    Every rank of the scope has to call the same methods in the same order.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        device: torch.device,
        hooks: TalkHooks,
        scope: Scope = "world",
        debug: bool = False,
        open_group: Callable[[Sequence[int] | None], Any] | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.hooks = hooks
        self.scope: Scope = scope
        self.debug = debug
        self._open_group = open_group

    def __repr__(self) -> str:
        return (
            f"Communicator(rank={self.rank}, size={self.size}, device='{self.device}', "
            f"scope={self.scope!r})"
        )

    def gather(self, t: torch.Tensor) -> torch.Tensor:
        """Return the tensors [k] of all ranks as one [size * k]; k is the same on all ranks."""
        return t if self.size == 1 else self.hooks.gather(t, self.scope)

    def reduce(
        self, t: torch.Tensor, op: ReduceOp = "sum", *, overwrite: bool = False
    ) -> torch.Tensor:
        """Return the elementwise sum, mean, max or min over the ranks, on every rank.

        The mean of integers or bools is float32. `t` stays as it is, unless `overwrite` allows
        its memory to be used, which saves a copy.
        """
        if op == "mean" and not (t.is_floating_point() or t.is_complex()):
            return (self.reduce(t.to(torch.int64)) / self.size).to(torch.float32)
        if self.size == 1:
            return t
        return self.hooks.reduce(t if overwrite else t.clone(), op, self.scope)

    def broadcast(self, t: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Return the tensor of rank `src`. On other ranks `t` may be overwritten with it."""
        return t if self.size == 1 else self.hooks.broadcast(t, src, self.scope)

    def scatter(
        self, parts: Sequence[torch.Tensor] | None, like: torch.Tensor, src: int = 0
    ) -> torch.Tensor:
        """Return this rank's part. `parts` matters on rank `src`: one per rank, sized as `like`."""
        if self.size == 1:
            return parts[0] if parts is not None else like
        return self.hooks.scatter(parts, like, src, self.scope)

    def all_to_all(self, t: torch.Tensor) -> torch.Tensor:
        """Send the i-th of `size` equal pieces of `t` to rank i; return those received."""
        return t if self.size == 1 else self.hooks.all_to_all(t, self.scope)

    def open_group(self) -> dist.ProcessGroup | None:
        """Return a new process group of the same ranks, for tensors in host memory.

        Whoever communicates beside the main thread needs one: nothing orders its transfers and
        those of others in the same way on every rank. All ranks of the scope call this. None
        where the backend has no such group.
        """
        if self.size == 1 or self._open_group is None:
            return None
        ranks = None if self.scope == "world" else self.gather_object(dist.get_rank())
        group: dist.ProcessGroup | None = self._open_group(ranks)
        return group

    def duplicate(self) -> Communicator | None:
        """Return a communicator of the same ranks for a thread, over a group of its own.

        It takes tensors in host memory. All ranks of the scope call this. None where the backend
        has no such group.
        """
        if self.size == 1:
            return self
        group = self.open_group()
        if group is None:
            return None
        host = torch.device("cpu")
        return Communicator(
            rank=self.rank, size=self.size, device=host, hooks=TorchTalk(group), scope=self.scope
        )

    def barrier(self) -> None:
        """Return once every rank has called this."""
        if self.size > 1:
            self.hooks.barrier(self.scope)

    def gather_object(self, obj: Any) -> list[Any]:
        """Return the picklable objects of all ranks, in rank order."""
        return [obj] if self.size == 1 else self.hooks.gather_object(obj, self.scope)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return the picklable object of rank `src`."""
        return obj if self.size == 1 else self.hooks.broadcast_object(obj, src, self.scope)

    def scatter_object(self, objs: Sequence[Any] | None, src: int = 0) -> Any:
        """Return this rank's one of the objects, one per rank, that rank `src` gives."""
        if self.size == 1:
            return None if objs is None else objs[0]
        return self.hooks.scatter_object(objs, src, self.scope)
