"""`TorchCollectives`: the collectives of the contract over torch.distributed, on flat tensors."""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from accelerate_core.contract.hooks import HOOKS, owner
from accelerate_core.contract.members import ReduceOp, Scope

if TYPE_CHECKING:
    from accelerate_core.contract.owner_hooks import CollectiveHooks
    from accelerate_core.contract.view import AcceleratorView

__all__ = ["ReduceOp", "Scope", "TorchCollectives", "as_memory", "bind_collectives", "host_group"]


_SMALL = 2**20  # results of at most this many bytes are gathered without a ring


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as flat uint8, sharing its memory."""
    return tensor.reshape(-1).view(torch.uint8)


def as_memory(tensor: torch.Tensor) -> memoryview:
    """View the memory of a contiguous CPU tensor without NumPy. The tensor must outlive the view."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def _object_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device for pickled objects: the CPU if the group supports it."""
    among: Any = group or dist.group.WORLD
    kinds = [device.type for device in among._device_types]
    return torch.device("cpu" if "cpu" in kinds or not kinds else kinds[0])


def _pickled(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


def _unpickled(data: torch.Tensor) -> Any:
    host = data.cpu()  # a variable, because the view does not keep its memory alive
    return pickle.loads(as_memory(host))


def host_group(
    ranks: Sequence[int] | None = None, timeout: timedelta | None = None
) -> dist.ProcessGroup | None:
    """Return a new group for tensors in host memory, or None if torch was built without gloo.

    Only the members of the group call this.

    Args:
        ranks: the members; None means all ranks.
        timeout: how long a collective of the group may wait.
    """
    if not dist.is_gloo_available():
        return None
    group: dist.ProcessGroup = dist.new_group(
        None if ranks is None else list(ranks),
        timeout=timeout,
        backend="gloo",
        use_local_synchronization=ranks is not None,
    )
    return group


class TorchCollectives:
    """The collectives over torch.distributed, for `Backend` and for a `Communicator`.

    Args:
        group: the group of every scope; None means the default group. Override `scope_group` to use
            a separate group for each scope.

    Tensors are 1-d, contiguous and on the backend's device. `scope` selects the ranks that take part:
    `"data"` (ranks with different samples), `"loss"` (ranks over which a loss is summed) or `"world"`.
    `src` is a rank within the scope. Only `reduce` and `broadcast` may overwrite their input. All other
    collectives send bytes, so that every dtype works with every kind of group.
    """

    _group: dist.ProcessGroup | None = None
    _without_avg: frozenset[tuple[Scope, torch.dtype]] = frozenset()

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def scope_group(self, scope: Scope) -> dist.ProcessGroup | None:
        """Return the process group of a scope; None means the default group."""
        return self._group

    @owner
    def gather(
        self, accelerator: AcceleratorView, tensor: torch.Tensor, scope: Scope
    ) -> torch.Tensor:
        """Return the tensors of all ranks as one tensor of n * k elements, in rank order.

        Each of the n ranks passes a tensor of k elements.
        """
        group = self.scope_group(scope)
        size = dist.get_world_size(group)
        out = tensor.new_empty(size * tensor.numel())
        if tensor.device.type == "cpu" and out.nbytes <= _SMALL:
            # A ring needs one round per rank. Small messages in host memory are sent to all ranks at once.
            sent = torch.cat([as_bytes(tensor)] * size)
            # Call the group's method directly, because torch's function would add a tenth of the total time.
            direct: Any = group or dist.group.WORLD
            direct.alltoall_base(as_bytes(out), sent, [], [], dist.AllToAllOptions()).wait()
            return out
        _all_gather()(as_bytes(out), as_bytes(tensor), group=group)
        return out

    @owner
    def reduce(
        self, accelerator: AcceleratorView, tensor: torch.Tensor, op: ReduceOp, scope: Scope
    ) -> torch.Tensor:
        """Return the elementwise `sum`, `mean` (floats only), `max` or `min` over the ranks."""
        group = self.scope_group(scope)
        if op != "mean":
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op.upper()), group=group)
            return tensor
        key = (scope, tensor.dtype)
        if key not in self._without_avg:
            try:
                dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=group)
                return tensor
            except (RuntimeError, ValueError) as error:
                # A group without AVG raises on every rank before anything is sent. Any other
                # error is a real failure.
                if "avg" not in str(error).lower():
                    raise
                self._without_avg |= {key}
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
        return tensor.div_(dist.get_world_size(group))

    @owner
    def broadcast(
        self, accelerator: AcceleratorView, tensor: torch.Tensor, src: int, scope: Scope
    ) -> torch.Tensor:
        """Return the tensor of rank `src` on every rank.

        The other ranks pass a tensor of the same size and dtype.
        """
        dist.broadcast(as_bytes(tensor), group=self.scope_group(scope), group_src=src)
        return tensor

    @owner
    def scatter(
        self,
        accelerator: AcceleratorView,
        parts: Sequence[torch.Tensor] | None,
        like: torch.Tensor,
        src: int,
        scope: Scope,
    ) -> torch.Tensor:
        """Return this rank's part of the `parts` that rank `src` passes; it has the size of `like`."""
        group = self.scope_group(scope)
        out = torch.empty_like(like)
        is_src = dist.get_rank(group) == src
        given = [as_bytes(part) for part in parts] if is_src and parts is not None else None
        dist.scatter(as_bytes(out), given, group=group, group_src=src)
        return out

    @owner
    def all_to_all(
        self, accelerator: AcceleratorView, tensor: torch.Tensor, scope: Scope
    ) -> torch.Tensor:
        """Exchange pieces of equal size: piece j of rank i becomes piece i of rank j."""
        out = torch.empty_like(tensor)
        dist.all_to_all_single(as_bytes(out), as_bytes(tensor), group=self.scope_group(scope))
        return out

    @owner
    def barrier(self, accelerator: AcceleratorView, scope: Scope) -> None:
        """Return once every rank has called this."""
        dist.barrier(group=self.scope_group(scope))

    # Objects are sent as bytes, because torch's own functions for objects need NumPy.

    @owner
    def gather_object(self, accelerator: AcceleratorView, obj: Any, scope: Scope) -> list[Any]:
        """Return the picklable objects of all ranks, in rank order."""
        data = _pickled(obj).to(_object_device(self.scope_group(scope)))
        own = torch.tensor([len(data)], device=data.device)
        lengths = TorchCollectives.gather(self, accelerator, own, scope).tolist()
        padded = data.new_zeros(max(lengths))
        padded[: len(data)] = data
        rows = TorchCollectives.gather(self, accelerator, padded, scope).view(len(lengths), -1)
        return [_unpickled(row[:length]) for row, length in zip(rows, lengths, strict=True)]

    @owner
    def broadcast_object(
        self, accelerator: AcceleratorView, obj: Any, src: int, scope: Scope
    ) -> Any:
        """Return the picklable object of rank `src` on every rank."""
        group = self.scope_group(scope)
        is_src = dist.get_rank(group) == src
        data = _pickled(obj if is_src else None).to(_object_device(group))
        length = torch.tensor([len(data)], device=data.device)
        dist.broadcast(length, group=group, group_src=src)
        if not is_src:
            data = data.new_empty(int(length))
        dist.broadcast(data, group=group, group_src=src)
        return obj if is_src else _unpickled(data)

    @owner
    def scatter_object(
        self, accelerator: AcceleratorView, objs: Sequence[Any] | None, src: int, scope: Scope
    ) -> Any:
        """Return this rank's object from the sequence that rank `src` passes."""
        every = TorchCollectives.broadcast_object(self, accelerator, objs, src, scope)
        return every[dist.get_rank(self.scope_group(scope))]


def bind_collectives(collectives: TorchCollectives) -> CollectiveHooks:
    """Return the collectives in the form that `Communicator` needs, without an Accelerator."""
    names = [name for name in vars(TorchCollectives) if name in HOOKS]
    bound = {name: partial(getattr(collectives, name), None) for name in names}
    return cast("CollectiveHooks", SimpleNamespace(**bound))


def _all_gather() -> Callable[..., Any]:
    # torch renamed this function. The old name warns in versions that have the new one.
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
