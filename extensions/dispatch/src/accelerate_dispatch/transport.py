"""How the reading rank's messages travel to the other ranks, as bytes and in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from accelerate_core.plugin import Communicator

SOURCE = 0  # the reading rank


class CollectiveTransport:
    """Sends with one scatter of a communicator per message, which blocks."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def send(self, rows: Sequence[torch.Tensor]) -> None:
        """Send row `r`, a uint8 tensor, to rank `r`. The rows may be reused at the next `send`.

        Args:
            rows: one tensor of shape [size] per rank.
        """
        parts = [row.to(self.comm.device) for row in rows]
        self.comm.scatter(parts, parts[SOURCE], SOURCE)

    def receive(self, size: int) -> Callable[[], torch.Tensor]:
        """Prepare to receive `size` bytes; call the result to wait for them (uint8, on the host)."""

        def wait() -> torch.Tensor:
            like = torch.empty(size, dtype=torch.uint8, device=self.comm.device)
            return self.comm.scatter(None, like, SOURCE).cpu()

        return wait

    def flush(self) -> None:
        """Wait until everything has been sent."""


class GroupTransport:
    """Sends point to point, in the background, over a process group that nothing else uses.

    A scatter in gloo waits for all ranks; a point-to-point message to one rank does not wait for
    the others. It has the methods of `CollectiveTransport`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._sent: list[Any] = []

    def send(self, rows: Sequence[torch.Tensor]) -> None:
        self.flush()
        # Calls the group's methods: torch's functions around them double the cost.
        self._sent = [
            self.group.send([row], rank, 0) for rank, row in enumerate(rows) if rank != SOURCE
        ]

    def receive(self, size: int) -> Callable[[], torch.Tensor]:
        # Each message gets new memory, because the tensors of a part are views of it.
        buffer = torch.empty(size, dtype=torch.uint8)
        work: Any = self.group.recv([buffer], SOURCE, 0)

        def wait() -> torch.Tensor:
            work.wait()
            return buffer

        return wait

    def flush(self) -> None:
        for work in self._sent:
            work.wait()
        self._sent = []


Transport = CollectiveTransport | GroupTransport
