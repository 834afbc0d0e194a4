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


_SMALL = 2**20  # bytes of a gathered result that is not worth a ring


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as flat uint8, sharing its memory."""
    return tensor.reshape(-1).view(torch.uint8)


def as_memory(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous host tensor's memory, without NumPy; it has to outlive the view."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def _object_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return where pickled objects travel: in host memory, where the group takes it."""
    among: Any = group or dist.group.WORLD
    kinds = [device.type for device in among._device_types]
    return torch.device("cpu" if "cpu" in kinds or not kinds else kinds[0])


def _pickled(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


def _unpickled(data: torch.Tensor) -> Any:
    host = data.cpu()  # has a name: the view of its memory does not keep it
    return pickle.loads(as_memory(host))


def host_group(
    ranks: Sequence[int] | None = None, timeout: timedelta | None = None
) -> dist.ProcessGroup | None:
    """Return a new group for tensors in host memory; None for `ranks` means all.

    Only its members call this. None where torch has no such group.

    Args:
        timeout: how long a collective in it may wait.
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
    """The collectives over torch.distributed: base of `Backend`, and enough for a `Communicator`.

    Args:
        group: the group for every scope; None is the default group of the process. Where scopes
            have groups of their own, `scope_group` is overridden.

    Tensors are 1-d, contiguous and on the backend's device. `scope` says which ranks take part:
    `"data"` (those with different samples), `"loss"` (those over which a loss is summed) or
    `"world"`; `src` is a rank within it. Only `reduce` and `broadcast` may write into their input.
    What only moves data goes as bytes, so every dtype works on every kind of group.
    """

    _group: dist.ProcessGroup | None = None
    _without_avg: frozenset[tuple[Scope, torch.dtype]] = frozenset()

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def scope_group(self, scope: Scope) -> dist.ProcessGroup | None:
        """Return the group that serves a scope; None is the default group."""
        return self._group

    @owner
    def gather(
        self, accelerator: AcceleratorView, tensor: torch.Tensor, scope: Scope
    ) -> torch.Tensor:
        """Return the ranks' flat tensors of k elements as one of n*k, in rank order."""
        group = self.scope_group(scope)
        size = dist.get_world_size(group)
        out = tensor.new_empty(size * tensor.numel())
        if tensor.device.type == "cpu" and out.nbytes <= _SMALL:
            # A ring takes a turn per rank; among hosts small messages go to all at once.
            sent = torch.cat([as_bytes(tensor)] * size)
            # The group's own method: the function around it is a tenth of the whole time.
            direct: Any = group or dist.group.WORLD
            direct.alltoall_base(as_bytes(out), sent, [], [], dist.AllToAllOptions()).wait()
            return out
        _all_gather()(as_bytes(out), as_bytes(tensor), group=group)
        return out

    @owner
    def reduce(
        self, accelerator: AcceleratorView, tensor: torch.Tensor, op: ReduceOp, scope: Scope
    ) -> torch.Tensor:
        """Combine elementwise by `sum`, `mean` (of floats), `max` or `min`, on every rank."""
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
                # A group that lacks AVG says so on every rank before anything is sent. Any other
                # failure is real.
                if "avg" not in str(error).lower():
                    raise
                self._without_avg |= {key}
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
        return tensor.div_(dist.get_world_size(group))

    @owner
    def broadcast(
        self, accelerator: AcceleratorView, tensor: torch.Tensor, src: int, scope: Scope
    ) -> torch.Tensor:
        """Give every rank the flat tensor of rank `src`; the others' has its size and dtype."""
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
        """Give each rank its own part, of the size of `like`, of what `src` holds."""
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
        """Exchange equal pieces: piece j of rank i becomes piece i of rank j."""
        out = torch.empty_like(tensor)
        dist.all_to_all_single(as_bytes(out), as_bytes(tensor), group=self.scope_group(scope))
        return out

    @owner
    def barrier(self, accelerator: AcceleratorView, scope: Scope) -> None:
        """Return when every rank has called it."""
        dist.barrier(group=self.scope_group(scope))

    # Objects travel as bytes: torch's own way to send them needs NumPy.

    @owner
    def gather_object(self, accelerator: AcceleratorView, obj: Any, scope: Scope) -> list[Any]:
        """Return the ranks' picklable objects in rank order, on every rank."""
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
        """Give every rank the object of rank `src`."""
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
        """Give each rank its own of the objects that `src` holds."""
        every = TorchCollectives.broadcast_object(self, accelerator, objs, src, scope)
        return every[dist.get_rank(self.scope_group(scope))]


def bind_collectives(collectives: TorchCollectives) -> CollectiveHooks:
    """Return the collectives as a `Communicator` takes them, for use without an Accelerator."""
    names = [name for name in vars(TorchCollectives) if name in HOOKS]
    bound = {name: partial(getattr(collectives, name), None) for name in names}
    return cast("CollectiveHooks", SimpleNamespace(**bound))


def _all_gather() -> Callable[..., Any]:
    # The same call was renamed; the older name warns where the newer one exists.
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
