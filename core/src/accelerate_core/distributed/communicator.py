"""`Communicator`: what one group of processes can say to each other, on flat tensors.

It adds to a backend's hooks only what holds for all of them: a group of one is the identity,
inputs are not changed, and the mean of integers is a float.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accelerate_core.contract.members import ReduceOp, Scope
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
        size: number of processes of the scope. With 1 every method is the identity.
        device: where the tensors of a collective have to be.
        hooks: the owner hooks of an Accelerator, or `bind_collectives(TorchCollectives())`.
        scope: which processes take part, "world" by default.
        debug: compare the shapes of all ranks before each collective on nested structures, at the
            price of one more collective each, and raise instead of letting the group break. Without
            it they are compared before the first one of each kind.
        verified: the kinds of collectives on nested structures that have been compared.
        backend: the backend's name, for errors about what its hooks return.
        new_group: makes a process group for tensors in host memory, of the given ranks of the
            world (None: all); may return None where there is no such group.

    Final: what differs between backends is in their hooks. Every rank of the scope has to call the
    same methods in the same order.
    """

    rank: int
    size: int
    device: torch.device
    hooks: CollectiveHooks = field(repr=False)
    scope: Scope = "world"
    debug: bool = False
    verified: set[str] = field(default_factory=set, repr=False)
    backend: str = ""
    new_group: Callable[[Sequence[int] | None], dist.ProcessGroup | None] | None = field(
        default=None, repr=False
    )

    def gather(self, t: torch.Tensor) -> torch.Tensor:
        """Return the tensors [k] of all ranks as one [size * k]; k is the same on all ranks."""
        if self.size == 1:
            return t
        return self._checked("gather", self.hooks.gather(t, self.scope), t, self.size)

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
        own = t if overwrite else t.clone()
        return self._checked("reduce", self.hooks.reduce(own, op, self.scope), t)

    def broadcast(self, t: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Return the tensor of rank `src`. On other ranks `t` may be overwritten with it."""
        if self.size == 1:
            return t
        return self._checked("broadcast", self.hooks.broadcast(t, src, self.scope), t)

    def scatter(
        self, parts: Sequence[torch.Tensor] | None, like: torch.Tensor, src: int = 0
    ) -> torch.Tensor:
        """Return this rank's part. `parts` matters on rank `src`: one per rank, sized as `like`."""
        if self.size == 1:
            return parts[0] if parts is not None else like
        return self._checked("scatter", self.hooks.scatter(parts, like, src, self.scope), like)

    def all_to_all(self, t: torch.Tensor) -> torch.Tensor:
        """Send the i-th of `size` equal pieces of `t` to rank i; return those received."""
        if self.size == 1:
            return t
        return self._checked("all_to_all", self.hooks.all_to_all(t, self.scope), t)

    def open_group(self) -> dist.ProcessGroup | None:
        """Return a new process group of the same ranks, for tensors in host memory.

        Whoever communicates beside the main thread needs one: nothing orders its transfers and
        those of others in the same way on every rank. All ranks of the scope call this. None
        where the backend has no such group.
        """
        if self.size == 1 or self.new_group is None:
            return None
        ranks = None if self.scope == "world" else self.gather_object(dist.get_rank())
        return self.new_group(ranks)

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
        hooks, host = bind_collectives(TorchCollectives(group)), torch.device("cpu")
        return Communicator(
            rank=self.rank, size=self.size, device=host, hooks=hooks, scope=self.scope
        )

    def alone(self) -> Communicator:
        """Return a communicator of this process only: every method is the identity."""
        return replace(self, rank=0, size=1)

    def barrier(self) -> None:
        """Return once every rank has called this."""
        if self.size > 1:
            self.hooks.barrier(self.scope)

    def _checked(
        self, hook: str, answer: torch.Tensor, given: torch.Tensor, times: int = 1
    ) -> torch.Tensor:
        """Return what a hook returned, which must have the dtype of `given`, and `times` its size."""
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
        """Return this rank's one of the objects, one per rank, that rank `src` gives."""
        if self.size == 1:
            return None if objs is None else objs[0]
        return self.hooks.scatter_object(objs, src, self.scope)
