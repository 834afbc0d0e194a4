"""`Communicator`: the collectives of one group of processes, on flat tensors.

It wraps a backend's hooks with rules that are the same for every backend: with one process every method is
the identity, inputs are not changed, and the mean of integers is a float.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accelerate_core.contract.members import ReduceOp, Scope
from accelerate_core.distributed.message_history import MessageHistory
from accelerate_core.distributed.torch_collectives import TorchCollectives, bind_collectives
from accelerate_core.errors import PluginError

if TYPE_CHECKING:
    from accelerate_core.contract.owner_hooks import CollectiveHooks

__all__ = ["Communicator"]


@dataclass(kw_only=True, eq=False)
class Communicator:
    """Collectives among the processes of one scope.

    Args:
        rank: index of this process among those of the scope.
        size: number of processes in the scope. With 1, every method is the identity.
        device: the device that the tensors of a collective must be on.
        hooks: the owner hooks of an Accelerator, or `bind_collectives(TorchCollectives())`.
        scope: which processes take part, "world" by default.
        debug: compare the structures on all ranks before each collective on nested structures. This costs
            an additional collective each time, and shows a mismatch at once on accelerators, too.
        history: what collectives on nested structures have sent, from which the next message follows.
        backend: the backend's name, for errors about values that its hooks return.
        new_group: creates a process group for tensors in host memory, from world ranks (None means
            all). May return None if the backend has no such groups.

    Don't subclass it: backends differ in their hooks. Every rank of the scope must call the same methods
    in the same order.
    """

    rank: int
    size: int
    device: torch.device
    hooks: CollectiveHooks = field(repr=False)
    scope: Scope = "world"
    debug: bool = False
    history: MessageHistory = field(default_factory=MessageHistory, repr=False)
    backend: str = ""
    new_group: Callable[[Sequence[int] | None], dist.ProcessGroup | None] | None = field(
        default=None, repr=False
    )

    @property
    def structure_digest(self) -> int:
        """A digest of all structures that were passed to collectives so far, which is equal on all ranks."""
        return self.history.digest

    def gather(self, t: torch.Tensor) -> torch.Tensor:
        """Concatenate the tensors of shape [k] of all ranks to [size * k]. k is equal on all ranks."""
        if self.size == 1:
            return t
        return self._checked("gather", self.hooks.gather(t, self.scope), t, self.size)

    def reduce(
        self, t: torch.Tensor, op: ReduceOp = "sum", *, overwrite: bool = False
    ) -> torch.Tensor:
        """Return the elementwise sum, mean, max or min over the ranks, on every rank.

        The mean of integers or bools is float32. `t` is not changed, unless `overwrite` allows it to save
        a copy.
        """
        if op == "mean" and not (t.is_floating_point() or t.is_complex()):
            return (self.reduce(t.to(torch.int64)) / self.size).to(torch.float32)
        if self.size == 1:
            return t
        own = t if overwrite else t.clone()
        return self._checked("reduce", self.hooks.reduce(own, op, self.scope), t)

    def all_equal(self, value: object) -> bool:
        """Return whether all ranks pass a value with the same `repr`.

        The ranks compare a digest with one reduction, so the cost doesn't grow with their number.
        """
        number = int(hashlib.blake2b(repr(value).encode(), digest_size=7).hexdigest(), 16)
        pair = torch.tensor([number, -number], device=self.device)
        largest, smallest = self.reduce(pair, "max", overwrite=True).tolist()
        return bool(largest == -smallest)

    def broadcast(self, t: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Return the tensor of rank `src`. On other ranks, `t` may be overwritten."""
        if self.size == 1:
            return t
        return self._checked("broadcast", self.hooks.broadcast(t, src, self.scope), t)

    def scatter(
        self, parts: Sequence[torch.Tensor] | None, like: torch.Tensor, src: int = 0
    ) -> torch.Tensor:
        """Return this rank's part. Only rank `src` needs `parts`, one per rank, each sized as `like`."""
        if self.size == 1:
            return parts[0] if parts is not None else like
        return self._checked("scatter", self.hooks.scatter(parts, like, src, self.scope), like)

    def all_to_all(self, t: torch.Tensor) -> torch.Tensor:
        """Send the i-th of `size` equal pieces of `t` to rank i, and return the received pieces."""
        if self.size == 1:
            return t
        return self._checked("all_to_all", self.hooks.all_to_all(t, self.scope), t)

    def open_group(self) -> dist.ProcessGroup | None:
        """Return a new process group of the same ranks for tensors in host memory, or None.

        A thread that communicates in the background needs its own group, because nothing orders its
        collectives and those of the main thread in the same way on every rank. All ranks of the scope must
        call this. The result is None if the backend has no such groups.
        """
        if self.size == 1 or self.new_group is None:
            return None
        ranks = None if self.scope == "world" else self.gather_object(dist.get_rank())
        return self.new_group(ranks)

    def duplicate(self) -> Communicator | None:
        """Return a communicator with its own group, for use in a thread, or None.

        It has the same ranks and takes tensors in host memory. All ranks of the scope must call this. The
        result is None if the backend has no such groups.
        """
        if self.size == 1:
            return self
        group = self.open_group()
        if group is None:
            return None
        hooks, host = bind_collectives(TorchCollectives(group)), torch.device("cpu")
        return Communicator(
            rank=self.rank, size=self.size, device=host, hooks=hooks, scope=self.scope
        )

    def alone(self) -> Communicator:
        """Return a communicator with only this process, so every method is the identity."""
        return replace(self, rank=0, size=1)

    def barrier(self) -> None:
        """Return once every rank has called this."""
        if self.size > 1:
            self.hooks.barrier(self.scope)

    def _checked(
        self, hook: str, answer: torch.Tensor, given: torch.Tensor, times: int = 1
    ) -> torch.Tensor:
        """Return a hook's result after checking its dtype, and that its size is `times` that of `given`."""
        wanted = times * given.numel(), given.dtype
        if (answer.numel(), answer.dtype) != wanted:
            raise PluginError(
                f"{hook} of backend {self.backend!r} returned {answer.numel()} elements of "
                f"{answer.dtype} on {self.size} ranks (scope {self.scope!r}); it must return "
                f"{wanted[0]} elements of {wanted[1]}."
            )
        return answer

    def gather_object(self, obj: Any) -> list[Any]:
        """Return the picklable objects of all ranks, in rank order."""
        if self.size == 1:
            return [obj]
        objects = self.hooks.gather_object(obj, self.scope)
        if len(objects) != self.size:
            raise PluginError(
                f"gather_object of backend {self.backend!r} returned {len(objects)} objects; it must "
                f"return one for each of the {self.size} ranks of the scope {self.scope!r}."
            )
        return objects

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return the picklable object of rank `src`."""
        if self.size == 1:
            return obj
        return self.hooks.broadcast_object(obj, src, self.scope)

    def scatter_object(self, objs: Sequence[Any] | None, src: int = 0) -> Any:
        """Return this rank's object from the sequence, one per rank, that rank `src` passes."""
        if self.size == 1:
            return None if objs is None else objs[0]
        return self.hooks.scatter_object(objs, src, self.scope)
