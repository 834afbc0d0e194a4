"""The messages that the reading rank sends: one transfer per global step.

A message consists of a fixed-size header, a description of the part's structure (only if it differs
from the previous message's), and the bytes of its tensors. All ranks know the capacity of a transfer.
If a message is larger, its header announces a second transfer with the contents, and the capacity
grows to that size. So batches of the same structure take one transfer each, and their structure is
sent once.
"""

from __future__ import annotations

import io
import pickle
import struct
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from accelerate_core.plugin import (
    NOTHING,
    AccelerateError,
    Layout,
    TensorInformation,
    as_memory,
    children,
    flatten,
    get_data_structure,
    layout_of,
    map_leaves,
    unpack,
)
from accelerate_dispatch.transport import SOURCE, Transport

# Has a part, last, more, failed; real samples, bytes of description, bytes in a second transfer.
_HEADER = struct.Struct("=4?4xqqq")
_HEADER_SIZE = 64  # bytes


class DispatchError(AccelerateError, RuntimeError):
    """The reading rank raised an exception that cannot be pickled, so other ranks raise this one.

    Cause: an exception in the dataset or in `collate_fn`; the message quotes it.
    Fix: fix the error at the end of the reading rank's traceback, which is attached as a note.
    """


@dataclass(slots=True)
class Message:
    """What one rank receives for one global step.

    Attributes:
        part: the rank's part of the batch; `NOTHING` if it has none.
        last: whether this is the rank's last part.
        more: whether another message follows.
        real: the number of real samples if the step was padded, else None.
        state: the loader's state after the step; it is not sent.
        failure: an exception that ends the epoch.
    """

    part: Any = NOTHING
    last: bool = False
    more: bool = False
    real: int | None = None
    state: Any = None
    failure: Exception | None = None


def sendable(error: Exception) -> Exception:
    """Return a copy of the exception for other ranks to raise, with its traceback as a note."""
    where = "".join(traceback.format_exception(error)).rstrip()
    try:
        copy: Exception = pickle.loads(pickle.dumps(error))
        if type(copy) is not type(error) or str(copy) != str(error):
            raise ValueError("the exception does not survive pickling")
    except Exception:
        copy = DispatchError(f"{type(error).__name__}: {error}")
    copy.add_note(f"Raised on process {SOURCE}, which reads the data for all processes:\n{where}")
    return copy


@dataclass(slots=True)
class _Encoded:
    """A message ready for a `SendBuffer`; an empty description means: same as the one before."""

    flags: tuple[bool, bool, bool, bool]
    real: int
    description: bytes = b""
    tensors: list[torch.Tensor] = field(default_factory=list)
    layout: Layout | None = None

    @property
    def size(self) -> int:
        return _aligned(len(self.description)) + (self.layout.total if self.layout else 0)


def _aligned(size: int) -> int:
    """Return the offset of the tensors that follow a description of `size` bytes."""
    return -(-size // 64) * 64  # aligned for every dtype


class Channel:
    """One end of the connection between the reading rank and the others.

    Args:
        transport: sends and receives the bytes.
        size: number of ranks.
        capacity: bytes of the first transfer.
    """

    def __init__(self, transport: Transport, size: int, capacity: int = 4096) -> None:
        self.transport = transport
        self.size = size
        self.capacity = capacity
        self._sent: list[tuple[Any, Layout | None]] = [(None, None)] * size
        self._structure: Any = None
        self._layout: Layout | None = None
        self._sending: SendBuffer | None = None
        self._arriving: Callable[[], torch.Tensor] | None = None

    def send(self, messages: Sequence[Message]) -> Message:
        """Send each rank its message; return the reading rank's own one unchanged."""
        own = messages[SOURCE]
        try:
            encoded = [self._encode(rank, each) for rank, each in enumerate(messages[1:], 1)]
        except Exception as error:  # pickling can raise anything
            own = Message(failure=error)
            encoded = [self._encode(1, Message(failure=sendable(error)))] * (self.size - 1)
        need = max((each.size for each in encoded), default=0)
        follows = need if _HEADER_SIZE + need > self.capacity else 0
        buffer = self._buffer(self.capacity)
        for rank, each in enumerate(encoded, 1):
            header = (*each.flags, each.real, len(each.description), follows)
            _HEADER.pack_into(buffer.memory, rank * buffer.width, *header)
            if not follows:
                buffer.write(rank, _HEADER_SIZE, each)
        self.transport.send(buffer.rows)
        if follows:
            self.capacity = _HEADER_SIZE + _aligned(need)
            buffer = self._buffer(_aligned(need))
            for rank, each in enumerate(encoded, 1):
                buffer.write(rank, 0, each)
            self.transport.send(buffer.rows)
        return own

    def expect(self) -> None:
        """Start to receive the next message in the background."""
        if self._arriving is None:
            self._arriving = self.transport.receive(self.capacity)

    def receive(self) -> Message:
        """Wait for the next message and return it."""
        self.expect()
        assert self._arriving is not None
        body = self._arriving()
        self._arriving = None
        return self._decoded(body)

    def close(self) -> None:
        """Wait for messages that are in flight."""
        if self._arriving is not None:
            self.receive()
        self.transport.flush()

    def _buffer(self, width: int) -> SendBuffer:
        self.transport.flush()  # the buffer may still be in use
        if self._sending is None or self._sending.width != width:
            self._sending = SendBuffer(self.size, width)
        return self._sending

    def _encode(self, rank: int, message: Message) -> _Encoded:
        has_part = message.part is not NOTHING
        failed = message.failure is not None
        encoded = _Encoded(
            (has_part, message.last, message.more, failed),
            -1 if message.real is None else message.real,
        )
        if failed:
            encoded.description = _pickled(message.failure)
        elif has_part:
            signature: list[Any] = []
            plain = _sign(message.part, signature, encoded.tensors)
            if not plain or signature != self._sent[rank][0]:
                encoded.description = _pickled(_described(message.part))
                self._sent[rank] = signature if plain else None, layout_of(encoded.tensors)
            encoded.layout = self._sent[rank][1]
        return encoded

    def _decoded(self, body: torch.Tensor) -> Message:
        has_part, last, more, failed, real, described, follows = _HEADER.unpack_from(
            as_memory(body)
        )
        body = body[_HEADER_SIZE:]
        if follows:
            self.capacity = _HEADER_SIZE + _aligned(follows)
            body = self.transport.receive(_aligned(follows))()
        text = bytes(as_memory(body[:described]))
        message = Message(last=last, more=more, real=None if real < 0 else real)
        if failed:
            message.failure = pickle.loads(text)
        elif has_part:
            if text:
                self._structure = pickle.loads(text)
                self._layout = layout_of(filter(_is_info, flatten(self._structure)))
            assert self._layout is not None
            begin = _aligned(described)
            values = iter(unpack(body[begin : begin + self._layout.total], self._layout))
            message.part = map_leaves(
                lambda leaf: next(values) if _is_info(leaf) else leaf, self._structure
            )
        return message


class SendBuffer:
    """Memory for one message to every rank."""

    def __init__(self, size: int, width: int) -> None:
        self.width = width
        self.memory = bytearray(size * width)
        self.rows = list(torch.frombuffer(self.memory, dtype=torch.uint8).view(size, width))
        self._views: list[tuple[Layout | None, int, list[torch.Tensor]]] = [(None, 0, [])] * size

    def write(self, rank: int, begin: int, message: _Encoded) -> None:
        """Write the description and the tensors into a rank's message, starting at byte `begin`."""
        if message.description:
            start = rank * self.width + begin
            self.memory[start : start + len(message.description)] = message.description
        layout = message.layout
        if layout is None or not message.tensors:
            return
        begin += _aligned(len(message.description))
        known, where, views = self._views[rank]
        if known is not layout or where != begin:
            # These views of the memory are reused for all messages of this structure.
            views = unpack(self.rows[rank][begin : begin + layout.total], layout)
            self._views[rank] = (layout, begin, views)
        for tensor, view in zip(message.tensors, views, strict=True):
            view.copy_(tensor)


def _is_info(leaf: Any) -> bool:
    return type(leaf) is TensorInformation


def _is_dense(leaf: Any) -> bool:
    return (
        type(leaf) is torch.Tensor
        and leaf.layout is torch.strided
        and not leaf.is_nested
        and not leaf.is_quantized
    )


def _sign(tree: Any, into: list[Any], tensors: list[torch.Tensor]) -> bool:
    """Collect what the tree's description depends on; return False if that cannot be compared.

    Strings and other objects are sent as part of the description, so a batch that contains them
    sends its description every time.
    """
    if _is_dense(tree):
        into.append((tree.shape, tree.dtype))
        tensors.append(tree)
        return True
    kind = type(tree)
    if tree is None or kind is bool or kind is int:
        into.append((kind, tree))
        return True
    inner = children(tree)
    if inner is None:
        return False
    is_mapping = isinstance(tree, Mapping)
    into.append((kind, tuple(tree) if is_mapping else len(inner)))
    plain = [_sign(child, into, tensors) for child in inner]
    # A custom mapping class may have attributes besides its items.
    return all(plain) and not (is_mapping and getattr(tree, "__dict__", None))


def _described(tree: Any) -> Any:
    """Return the tree with a `TensorInformation` in place of every tensor that is sent as bytes."""
    return map_leaves(lambda leaf: get_data_structure(leaf) if _is_dense(leaf) else leaf, tree)


class _Pickler(pickle.Pickler):
    """Pickles only the visible part of a tensor; pickling a slice would include its whole batch."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided:
            return NotImplemented
        tensor = obj.detach().cpu()
        if tensor.untyped_storage().nbytes() > tensor.nbytes:
            tensor = tensor.clone()
        tensor.requires_grad_(obj.requires_grad and obj.is_leaf)
        reduce: Any = tensor.__reduce_ex__
        return reduce(pickle.HIGHEST_PROTOCOL)


def _pickled(obj: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()
