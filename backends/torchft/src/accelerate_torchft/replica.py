"""`Replica`: the quorum of one replica, its averages with the others, and its votes."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceOp
from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

from accelerate_core.plugin import CommunicatorView
from accelerate_torchft.settings import TorchFTKwargs

logger = logging.getLogger(__name__)

#: The variable with the file that a replica creates when it joins its first quorum.
JOINED = "ACCELERATE_TORCHFT_JOINED"
#: Gradients are averaged in buckets of this many bytes.
_BUCKET = 32 * 2**20


@dataclass
class Counts:
    """What happened to this replica so far.

    Attributes:
        replicas: the number of replicas that train now.
        commits: steps that all of them took.
        failures: steps that were not taken, because a replica was lost.
        heals: how often this replica received the state of another one.
        changes: how often the number of replicas, or this replica's number, changed.
    """

    replicas: int = 0
    commits: int = 0
    failures: int = 0
    heals: int = 0
    changes: int = 0


@dataclass(eq=False)
class Replica:
    """The quorum of one replica. All of its ranks call the methods in the same order.

    Args:
        settings: addresses and timeouts.
        comm: the communicator of the ranks of this replica.
        capture, restore: copy and load the state that a joining replica receives.
    """

    settings: TorchFTKwargs
    comm: CommunicatorView
    capture: Callable[[], Any]
    restore: Callable[[Any], None]
    counts: Counts = field(default_factory=Counts, init=False)
    #: Whether the current quorum has voted about a step, and whether the vote failed.
    voted: bool = field(default=False, init=False)
    failed: bool = field(default=False, init=False)
    #: Whether this replica waits for a quorum.
    waiting: bool = field(default=False, init=False)
    #: Number of this replica in the quorum, and of replicas in it; None before the first quorum.
    place: tuple[int, int] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        given = self.settings
        host = _host()
        # torchft logs each failed collective with a traceback, which `vote` reports in one line.
        logging.getLogger("torchft.manager").setLevel(logging.CRITICAL)
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        self._store, port = self._shared_store(host)
        timeout = timedelta(seconds=given.timeout)
        group = ProcessGroupNCCL if self.comm.device.type == "cuda" else ProcessGroupGloo
        self.group = group(timeout=timeout)
        self.manager = Manager(
            pg=self.group,
            load_state_dict=self._heal,
            state_dict=self.capture,
            min_replica_size=given.min_replicas,
            use_async_quorum=False,
            timeout=timeout,
            quorum_timeout=timedelta(seconds=given.quorum_timeout),
            connect_timeout=timeout,
            rank=self.comm.rank,
            world_size=self.comm.size,
            store_addr=host,
            store_port=port,
            lighthouse_addr=given.lighthouse,
            replica_id=f"replica_{given.replica}",
            hostname=host,
        )

    def _shared_store(self, host: str) -> tuple[dist.TCPStore, int]:
        """Start a store for the ranks of this replica. The other replicas reach it, too."""
        first = self.comm.rank == 0
        wait = timedelta(seconds=self.settings.timeout)
        store = dist.TCPStore(host, 0, None, True, wait, False) if first else None
        port = int(self.comm.broadcast_object(store.port if store is not None else 0))
        return store or dist.TCPStore(host, port, None, False, wait, False), port

    def _heal(self, state: Any) -> None:
        self.restore(state)
        self.counts.heals += 1

    def open(self) -> bool:
        """Form a quorum with all replicas that are ready, and return whether anything changed.

        A replica that is behind receives the state of another one before this returns.
        """
        heals = self.counts.heals
        self.waiting = True
        self.manager.start_quorum()
        self.waiting = False
        self.voted = self.failed = False
        rank, size = self.manager.participating_rank(), self.manager.num_participants()
        place = (0 if rank is None else rank, max(size, 1))
        changed = place != self.place
        if self.place is None:
            _mark_joined()
        else:
            self.counts.changes += changed
        self.place = place
        self.counts.replicas = place[1]
        return changed or self.counts.heals > heals

    def vote(self) -> bool:
        """Return whether all ranks of this replica completed the step without an error."""
        committed = bool(self.manager.should_commit())
        if not committed and self.comm.rank == 0:
            error = self.manager.errored()
            cause = "a rank reported an error" if error is None else error.original_exception
            logger.warning(
                "Replica %d did not commit step %d and repeats it: %s",
                self.settings.replica,
                self.manager.current_step(),
                str(cause).split(". This is typically", 1)[0],
            )
        self.voted = True
        self.failed = self.failed or not committed
        self.counts.commits += committed
        self.counts.failures += not committed
        return committed

    @property
    def alone(self) -> bool:
        """Whether there is no other replica at the moment."""
        return self.place is None or self.place[1] == 1

    @torch.no_grad()
    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by their means over the replicas. An error makes the next vote fail."""
        if self.alone:
            return
        buckets: list[list[torch.Tensor]] = []
        filled = 0
        for tensor in tensors:
            last = buckets[-1][0] if buckets else None
            same = last is not None and (last.dtype, last.device) == (tensor.dtype, tensor.device)
            if not same or filled >= _BUCKET:
                buckets.append([])
                filled = 0
            buckets[-1].append(tensor)
            filled += tensor.nbytes
        sent = [torch.cat([one.reshape(-1) for one in bucket]) for bucket in buckets]
        works = [self.manager.allreduce(flat) for flat in sent]
        for work, flat, bucket in zip(works, sent, buckets, strict=True):
            work.wait()
            pieces = torch.split(flat, [one.numel() for one in bucket])
            for one, piece in zip(bucket, pieces, strict=True):
                one.copy_(piece.view_as(one))

    def reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """Combine a tensor over the replicas. An error makes the next vote fail."""
        if not self.alone:
            operator = ReduceOp.AVG if op == "mean" else getattr(ReduceOp, op.upper())
            self.manager.allreduce(tensor, reduce_op=operator).wait()
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the tensors of all replicas in one, or None if a replica was lost."""
        if self.alone:
            return tensor
        if self.manager.errored():
            return None
        _, size = self.place or (0, 1)
        rows = [torch.empty_like(tensor) for _ in range(size)]
        try:
            self.group.allgather([rows], [tensor], AllgatherOptions()).wait()
        except RuntimeError as error:
            self.manager.report_error(error)
            return None
        return torch.cat(rows)

    def close(self) -> None:
        """Leave the quorum, and end torchft's threads unless one of them waits for a quorum."""
        self.manager.shutdown(wait=not self.waiting)


def _mark_joined() -> None:
    """Tell the launcher that this replica is in a quorum."""
    if JOINED in os.environ:
        Path(os.environ[JOINED]).touch()


def _host() -> str:
    """Return a name of this machine that the other replicas can resolve, or the loopback address."""
    name = os.environ.get("TORCHFT_HOSTNAME") or socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "127.0.0.1"
    return name
