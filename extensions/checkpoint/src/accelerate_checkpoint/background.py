"""Save in the background: copy the state to host memory and write it from a thread."""

from __future__ import annotations

import atexit
import copy
import mmap
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from accelerate_core.plugin import fail_at_exit, map_leaves


class Background:
    """The current background save: its thread, its copies of the state and its process group."""

    def __init__(self) -> None:
        self.staging = Staging()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._collectives: Any = None

    def open(self, collectives: Any) -> Any:
        """Return collectives that background threads may use, or None if the backend has none."""
        if collectives.size == 1:
            return collectives
        if self._collectives is None:
            self._collectives = collectives.duplicate()
        return self._collectives

    def run(self, job: Callable[[], None]) -> None:
        """Start a job in a thread. The process does not exit before the job is done."""

        def work() -> None:
            try:
                job()
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=work, name="save_state")
        _running.add(self)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the current save. If it failed, raise its exception, once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        _running.discard(self)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


#: The saves whose results nothing has asked for.
_running: set[Background] = set()


def show_failure(background: Background) -> None:
    """Wait for the current save. If it failed and nothing else has raised its error, show it.

    The process then exits with status 1.
    """
    try:
        background.wait()
    except BaseException as error:
        fail_at_exit(error)


@atexit.register
def _show_failures() -> None:
    for background in list(_running):
        show_failure(background)


class Staging:
    """Copies states into host memory that the next save reuses.

    Allocating new memory takes several times as long as the copy itself, because the system has
    to find and clear every page.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._next = 0
        self._memo: dict[Any, torch.Tensor] = {}

    def begin(self) -> None:
        """Start copying for another save. This overwrites the copies of the previous one."""
        self._next = 0

    def release(self) -> None:
        """Free the memory."""
        self._buffers, self._memo = [], {}
        self.begin()

    def copy(self, state: Any) -> Any:
        """Return a copy that shares no memory with `state`. Containers keep their types."""
        # An address identifies a tensor only as long as the state holds that tensor.
        self._memo = {}
        return map_leaves(self._leaf, state)

    def _leaf(self, leaf: Any) -> Any:
        return self._tensor(leaf) if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        source = tensor.detach()
        if source.layout != torch.strided:
            return copy.deepcopy(source.cpu())
        if type(source) not in (torch.Tensor, torch.nn.Parameter):
            return copy.deepcopy(source)
        place = (source.device, source.data_ptr(), source.dtype, source.shape, source.stride())
        if source.numel() and place in self._memo:
            return self._memo[place]  # two names of the same tensor share one copy
        buffer = self._buffer(source.nbytes)
        made = buffer[: source.nbytes].view(source.dtype).view(source.shape)
        # Copies from a device are only queued; readers synchronize with the device first.
        made.copy_(source, non_blocking=source.device.type != "cpu")
        self._memo[place] = made
        return made

    def _buffer(self, size: int) -> torch.Tensor:
        index = self._next
        self._next += 1
        if index < len(self._buffers) and self._buffers[index].numel() >= size:
            return self._buffers[index]
        made = _host_memory(size)
        self._buffers[index : index + 1] = [made]
        return made


def _host_memory(size: int) -> torch.Tensor:
    if torch.accelerator.is_available():
        # Devices copy to pinned memory without waiting. Not all devices have it.
        with suppress(RuntimeError):
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    if size < (1 << 22):
        return torch.empty(size, dtype=torch.uint8)
    region = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)  # 512 times fewer pages to allocate
    return torch.frombuffer(region, dtype=torch.uint8)
