"""Messages from the rank that reads to the others, as bytes: one transfer per global step.

A message is a header of fixed size, the description of the part if it is not that of the message
before, and the part's tensors. All ranks know the capacity of a transfer; a message that needs more
announces the rest in its header, which follows in a second transfer, and the capacity grows to it.
So batches of one structure take one transfer each, and the structure travels once.
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

from accelerate_core.data.dispatch.transport import SOURCE, Transport
from accelerate_core.data.steps import NOTHING
from accelerate_core.distributed.packing import Layout, layout_of, unpack
from accelerate_core.distributed.torch_collectives import as_memory
from accelerate_core.distributed.tree import (
    TensorInformation,
    children,
    flatten,
    get_data_structure,
    map_leaves,
)
from accelerate_core.errors import AccelerateError

# Part or not, last, more, failed; real samples, bytes of description, bytes that follow.
_HEADER = struct.Struct("=4?4xqqq")
_HEADER_SIZE = 64  # bytes


class DispatchError(AccelerateError, RuntimeError):
    """The rank that reads the data for all failed in a way that cannot be sent as it is.

    Cause: an exception in the dataset or in `collate_fn` of the rank that reads; the text has it.
    Mend: what that rank's traceback names.
    """


@dataclass(slots=True)
class Message:
    """What a rank receives per global step.

    `part` is the rank's part of the batch, `NOTHING` if it has none. `last`: no part follows.
    `more`: another message will follow. `real`: samples of the step if it was filled up, else
    None. `state`: that of the loader after the step; it is not sent. `failure`: the exception that
    ends the data.
    """

    part: Any = NOTHING
    last: bool = False
    more: bool = False
    real: int | None = None
    state: Any = None
    failure: Exception | None = None


def sendable(error: Exception) -> Exception:
    """Return the exception as other ranks can raise it, told where it happened."""
    where = "".join(traceback.format_exception(error)).rstrip()
    try:
        copy: Exception = pickle.loads(pickle.dumps(error))
        if type(copy) is not type(error) or str(copy) != str(error):
            raise ValueError("the exception does not survive pickling")
    except Exception:
        copy = DispatchError(f"{type(error).__name__}: {error}")
    copy.add_note(f"Raised on process {SOURCE}, which reads the data for all:\n{where}")
    return copy


@dataclass(slots=True)
class _Encoded:
    """A message for a `SendBuffer`; no description: as in the message before."""

    flags: tuple[bool, bool, bool, bool]
    real: int
    description: bytes = b""
    tensors: list[torch.Tensor] = field(default_factory=list)
    layout: Layout | None = None

    @property
    def size(self) -> int:
        return _aligned(len(self.description)) + (self.layout.total if self.layout else 0)


def _aligned(size: int) -> int:
    """Return where tensors begin behind a description of so many bytes."""
    return -(-size // 64) * 64  # every dtype may begin there


class Channel:
    """One end of the connection between the reading rank and the others.

    Args:
        transport: carries the bytes.
        size: number of ranks.
        capacity: bytes of a transfer, to start with.
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
        """Send every rank its message; return that of the reading rank, as it is."""
        own = messages[SOURCE]
        try:
            encoded = [self._encode(rank, each) for rank, each in enumerate(messages[1:], 1)]
        except Exception as error:  # what cannot be pickled raises all kinds
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
        """Get ready for the next message, so that it can arrive before it is asked for."""
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
        """Wait for what is under way."""
        if self._arriving is not None:
            self.receive()
        self.transport.flush()

    def _buffer(self, width: int) -> SendBuffer:
        self.transport.flush()  # what is in the buffer may still be on its way
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
    """Memory for a message to every rank."""

    def __init__(self, size: int, width: int) -> None:
        self.width = width
        self.memory = bytearray(size * width)
        self.rows = list(torch.frombuffer(self.memory, dtype=torch.uint8).view(size, width))
        self._views: list[tuple[Layout | None, int, list[torch.Tensor]]] = [(None, 0, [])] * size

    def write(self, rank: int, begin: int, message: _Encoded) -> None:
        """Write description and tensors into a rank's message, from byte `begin` on."""
        if message.description:
            start = rank * self.width + begin
            self.memory[start : start + len(message.description)] = message.description
        layout = message.layout
        if layout is None or not message.tensors:
            return
        begin += _aligned(len(message.description))
        known, where, views = self._views[rank]
        if known is not layout or where != begin:
            # Views of the memory, made once for all messages of one structure.
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
    """Note what a description of the tree depends on; False if that cannot be compared.

    Strings and other objects are part of the description, so a batch of them describes itself
    anew each time.
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
    # A mapping class of someone's may carry attributes beside its items.
    return all(plain) and not (is_mapping and getattr(tree, "__dict__", None))


def _described(tree: Any) -> Any:
    """Return the tree with a `TensorInformation` for every tensor that travels as bytes."""
    return map_leaves(lambda leaf: get_data_structure(leaf) if _is_dense(leaf) else leaf, tree)


class _Pickler(pickle.Pickler):
    """Pickles of a tensor only what it shows: a slice would drag its whole batch along."""

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
