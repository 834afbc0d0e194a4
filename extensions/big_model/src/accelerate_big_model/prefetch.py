"""Read the weights of the next layers from disk while a layer computes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from accelerate_big_model.device_map import free_memory
from accelerate_big_model.mapped import read_in
from accelerate_big_model.offload import OffloadedWeightsLoader, whole_map
from accelerate_big_model.tensors import TiedMap, offload_hook
from accelerate_core.plugin import CheckpointError

Ready = tuple[dict[str, torch.Tensor], Any]
#: Devices whose layers use weights directly in host memory.
_IN_PLACE = ("cpu", "meta", "mps")
_BLOCK = re.compile(r"^((?:.*?\.)?\d+)(\.|$)")


@dataclass
class _Layer:
    """The weights that one hook loads."""

    weights: Mapping[str, torch.Tensor]
    names: Sequence[str]
    tied: TiedMap | None
    bytes: int = 0

    @cached_property
    def _full(self) -> list[tuple[str, Any, str]]:
        return [(name, *whole_map(self.weights, name)) for name in self.names]

    def parts(self) -> Iterator[tuple[str, Any, str, bool]]:
        """Yield each weight's name, the model's weights, its full name, and whether it is on disk."""
        for name, whole, full in self._full:
            on_disk = isinstance(whole, OffloadedWeightsLoader) and whole.on_disk(full)
            yield name, whole, full, on_disk


class ReadAhead:
    """Loads the weights of the layers that run next, as far as free memory allows.

    The first prediction is that layers run in the order of their registration. Later predictions use
    the observed order, given the last two layers that ran. A wrong prediction only wastes the read.

    A thread reads the pages of mapped files. For an accelerator, it also copies them through pinned
    memory on its own stream. For the CPU, it skips weights that are already in the system's page
    cache, because reading them would only take time from the computation.

    Args:
        device: where the layers run.
        layers: the weights that each layer loads.
        block: bytes of the largest block of the model, which is the limit for reading ahead.
    """

    def __init__(self, device: torch.device, layers: Sequence[_Layer], block: int) -> None:
        self.device = device
        self.layers = list(layers)
        self.block = block
        self.window = block
        #: False if layers use weights directly in host memory, so that no copy is needed.
        self._copies = device.type not in _IN_PLACE
        count = len(self.layers)
        self._after = {at: (at + 1) % count for at in range(count)}
        self._after_two: dict[tuple[int, int], int] = {}
        self._last = (-1, -1)
        self._entered = 0
        self._reset()

    def _reset(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._stream: Any = None
        self._begun: dict[int, Future[Ready | None] | None] = {}
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        made = ("_pool", "_stream", "_begun")
        return {name: value for name, value in self.__dict__.items() if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def enter(self, at: int) -> dict[str, torch.Tensor]:
        """Wait for a layer's weights, and start loading those of the next layers.

        Returns:
            The layer's weights by name, on the device, without tied weights that have copies per
            device.

        Raises:
            CheckpointError: a weight can't be read.
        """
        if self._process != os.getpid():
            self._reset()  # a forked process doesn't have the thread
        before, last = self._last
        self._after[last] = at
        self._after_two[before, last] = at
        self._last = (last, at)
        begun = self._begun.pop(at, None)
        ready, done = (begun and begun.result()) or self._read(at)
        if done is not None:
            stream = torch.accelerator.current_stream(self.device)
            stream.wait_event(done)
            for tensor in ready.values():
                tensor.record_stream(stream)
        self._continue()
        return ready

    def _following(self) -> Iterator[int]:
        before, last = self._last
        seen = {last}
        while True:
            at = self._after_two.get((before, last), self._after.get(last, -1))
            if at < 0 or at in seen:
                return
            seen.add(at)
            yield at
            before, last = last, at

    def _continue(self) -> None:
        if self._entered % len(self.layers) == 0:
            self.window = min(self.block, free_memory(self.device) // 2)
        self._entered += 1
        coming = list[int]()
        taken = 0
        for at in self._following():
            taken += self.layers[at].bytes
            if taken > self.window and coming:
                break
            coming.append(at)
        for at in self._begun.keys() - set(coming):  # the prediction was wrong
            del self._begun[at]
        for at in coming:
            if at not in self._begun:
                # This fails if a file has changed, or during shutdown, when no thread can start. The
                # layer then loads its own weights and reports the error.
                with suppress(RuntimeError, CheckpointError):
                    self._begun[at] = self._begin(at)

    def _begin(self, at: int) -> Future[Ready | None] | None:
        """Start loading a layer. Return None if everything is already in memory."""
        cached = [
            self._copies or not on_disk or whole.is_cached(full)
            for _, whole, full, on_disk in self.layers[at].parts()
        ]
        fetch = not self._copies and None not in cached
        if fetch and all(cached):
            return None
        self._pool = self._pool or ThreadPoolExecutor(1, "read-ahead")
        return self._pool.submit(self._fetch if fetch else self._read_ahead, at)

    def _fetch(self, at: int) -> None:
        for _, whole, full, on_disk in self.layers[at].parts():
            with _named(full):
                if on_disk:
                    whole.fetch(full)

    def _read_ahead(self, at: int) -> Ready | None:
        try:
            return self._read(at)
        except torch.OutOfMemoryError:  # `enter` reads it again after the layer before has ended
            return None

    def _read(self, at: int) -> Ready:
        layer = self.layers[at]
        ready = {}
        for name, whole, full, on_disk in layer.parts():
            tensor = whole[full]
            if layer.tied is not None and tensor.data_ptr() in layer.tied:
                continue
            if on_disk:
                with _named(full):
                    read_in(tensor)
            ready[name] = tensor
        if not self._copies:
            return ready, None
        self._stream = self._stream or torch.Stream(self.device)
        with self._stream:
            for name, tensor in ready.items():
                ready[name] = tensor.pin_memory().to(self.device, non_blocking=True)
        return ready, self._stream.record_event()


@contextmanager
def _named(weight: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"Cannot read the offloaded weight {weight!r}: {error}. Its file may have been changed or "
            "truncated."
        ) from None


def read_ahead(model: nn.Module, device: torch.device) -> None:
    """Make the offloaded layers of a model load their weights ahead.

    Args:
        model: the model, with its hooks attached.
        device: where the layers run.
    """
    layers: list[_Layer] = []
    blocks: dict[str, int] = {}
    hooks = []
    for name, module in model.named_modules():
        hook = offload_hook(module)
        if hook is None:
            continue
        names = hook.names(module)
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        size = sum(tensors[one].nbytes for one in names)
        whole, prefix = whole_map(hook.weights_map, "")
        on_disk = isinstance(whole, OffloadedWeightsLoader) and any(
            whole.on_disk(f"{prefix}{one}") for one in names
        )
        if names and (on_disk or device.type not in _IN_PLACE):
            hooks.append(hook)
            layers.append(_Layer(hook.weights_map, names, hook.tied_params_map, size))
            found = _BLOCK.match(name)
            block = found.group(1) if found else name
            blocks[block] = blocks.get(block, 0) + size
    if layers:
        ahead = ReadAhead(device, layers, max(blocks.values()))
        for at, hook in enumerate(hooks):
            hook.ahead = ahead
            hook.place = at
