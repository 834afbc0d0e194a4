"""Bytes from the rank that reads to the others, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from accelerate_core.distributed.communicator import Communicator

SOURCE = 0  # the rank that reads


class CollectiveTransport:
    """Sends over a communicator: one scatter each, when it is waited for."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def send(self, rows: Sequence[torch.Tensor]) -> None:
        """Send row r, uint8 of equal lengths, to rank r. The rows are free at the next `send`."""
        parts = [row.to(self.comm.device) for row in rows]
        self.comm.scatter(parts, parts[SOURCE], SOURCE)

    def receive(self, size: int) -> Callable[[], torch.Tensor]:
        """Get ready for `size` bytes; the result waits for them and returns them, in host memory."""

        def wait() -> torch.Tensor:
            like = torch.empty(size, dtype=torch.uint8, device=self.comm.device)
            return self.comm.scatter(None, like, SOURCE).cpu()

        return wait

    def flush(self) -> None:
        """Return when everything sent has left."""


class GroupTransport:
    """Sends over a group that nobody else uses: point to point, under way while others work.

    A scatter of gloo waits for all ranks; what is sent to one rank need not wait for another. The
    methods are those of `CollectiveTransport`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._sent: list[Any] = []

    def send(self, rows: Sequence[torch.Tensor]) -> None:
        self.flush()
        # The group's own methods: the functions around them cost as much again.
        self._sent = [
            self.group.send([row], rank, 0) for rank, row in enumerate(rows) if rank != SOURCE
        ]

    def receive(self, size: int) -> Callable[[], torch.Tensor]:
        # New memory for each: the tensors of a part are views of it.
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
