"""Letters from the rank that reads to the others, as bytes: one transfer per global step.

A letter is a head of fixed size, the description of the part if it is not that of the letter
before, and the part's tensors. All ranks know the room a letter may take; one that needs more
announces the rest in its head, which follows in a second transfer, and the room grows to it. So
batches of one structure take one transfer each, and the structure travels once.
"""

from __future__ import annotations

import io
import pickle
import struct
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from accelerate_core.distributed.communicator import Communicator
from accelerate_core.distributed.packing import Layout, layout_of, unpack
from accelerate_core.distributed.torch_collectives import as_memory
from accelerate_core.distributed.tree import (
    TensorInformation,
    get_data_structure,
    is_record,
    is_sequence,
    iterate_leaves,
    map_leaves,
    record_items,
)
from accelerate_core.errors import AccelerateError

__all__ = ["SOURCE", "CommPost", "DispatchError", "GroupPost", "Letter", "Wire", "sendable"]

SOURCE = 0  # the rank that reads
_HEAD = 64  # bytes
_FIELDS = struct.Struct("=qqqq")  # flags, real, bytes of description, bytes that follow
_HAS_PART, _LAST, _MORE, _FAILED = 1, 2, 4, 8


class DispatchError(AccelerateError, RuntimeError):
    """The rank that reads the data for all failed in a way that cannot be sent as it is."""


@dataclass(slots=True)
class Letter:
    """What a rank receives per global step.

    `part` is the rank's part of the batch, if `has_part`. `last`: no part follows. `more`: another
    letter will follow. `real`: samples of the step if it was filled up, else None. `failure`: the
    exception that ends the data. `state`: that of the loader after the step; it is not sent.
    """

    part: Any = None
    has_part: bool = False
    last: bool = False
    more: bool = False
    real: int | None = None
    failure: Exception | None = None
    state: Any = None


@dataclass(slots=True)
class _Packed:
    flags: int
    real: int
    described: bytes  # empty: as in the letter before
    tensors: list[torch.Tensor]
    layout: Layout | None

    @property
    def size(self) -> int:
        return _after(len(self.described)) + (self.layout.total if self.layout else 0)


def _after(size: int) -> int:
    """Return where tensors begin behind a description of so many bytes."""
    return -(-size // 64) * 64  # every dtype may begin there


class _Unsendable(Exception):
    """A letter cannot be packed, for a `reason`; nothing was sent."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


def sendable(error: Exception) -> Exception:
    """Return the exception as other ranks can raise it, told where it happened."""
    where = "".join(traceback.format_exception(error)).rstrip()
    note = f"Raised on process {SOURCE}, which reads the data for all:\n{where}"
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is not type(error) or str(copy) != str(error):
            raise ValueError("the exception does not survive pickling")
    except Exception:
        copy = DispatchError(f"{type(error).__name__}: {error}")
    copy.add_note(note)
    return copy  # type: ignore[no-any-return]


class Post(Protocol):
    """Carries runs of bytes from the reading rank to the others, in order."""

    def send(self, rows: Sequence[torch.Tensor]) -> None:
        """Send row r, uint8 of equal lengths, to rank r. The rows are free at the next `send`."""

    def expect(self, size: int) -> Callable[[], torch.Tensor]:
        """Get ready for `size` bytes; the result waits for them and returns them, in host memory."""

    def settle(self) -> None:
        """Return when everything sent has left."""


class CommPost:
    """A post over a communicator: one scatter each, when it is waited for."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def send(self, rows: Sequence[torch.Tensor]) -> None:
        parts = [row.to(self.comm.device) for row in rows]
        self.comm.scatter(parts, parts[SOURCE], SOURCE)

    def expect(self, size: int) -> Callable[[], torch.Tensor]:
        def wait() -> torch.Tensor:
            like = torch.empty(size, dtype=torch.uint8, device=self.comm.device)
            return self.comm.scatter(None, like, SOURCE).cpu()

        return wait

    def settle(self) -> None:
        pass


class GroupPost:
    """A post over a group that nobody else uses: point to point, under way while others work.

    A scatter of gloo waits for all ranks; what is sent to one rank need not wait for another.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._sent: list[Any] = []

    def send(self, rows: Sequence[torch.Tensor]) -> None:
        self.settle()
        # The group's own methods: the functions around them cost as much again.
        self._sent = [
            self.group.send([row], rank, 0) for rank, row in enumerate(rows) if rank != SOURCE
        ]

    def expect(self, size: int) -> Callable[[], torch.Tensor]:
        # New memory for each: the tensors of a part are views of it.
        buffer = torch.empty(size, dtype=torch.uint8)
        work: Any = self.group.recv([buffer], SOURCE, 0)

        def wait() -> torch.Tensor:
            work.wait()
            return buffer

        return wait

    def settle(self) -> None:
        for work in self._sent:
            work.wait()
        self._sent = []


class Wire:
    """One end of the connection between the reading rank and the others.

    Args:
        post: carries the bytes.
        size: number of ranks.
        room: bytes to start with.
    """

    def __init__(self, post: Post, size: int, room: int = 4096) -> None:
        self.post = post
        self.size = size
        self.room = room
        self._signatures: list[Any] = [None] * size
        self._layouts: list[Layout | None] = [None] * size
        self._structure: Any = None
        self._layout: Layout | None = None
        self._sheets: list[_Sheet] = []
        self._arriving: Callable[[], torch.Tensor] | None = None

    def send(self, letters: Sequence[Letter]) -> Letter:
        """Send every rank its letter; return that of the reading rank, as it is."""
        try:
            packed = self._pack(letters)
        except _Unsendable as error:
            self._send(self._pack([Letter(failure=sendable(error.reason))] * self.size))
            return Letter(failure=error.reason)
        self._send(packed)
        return letters[SOURCE]

    def expect(self) -> None:
        """Get ready for the next letter, so that it can arrive before it is asked for."""
        if self._arriving is None:
            self._arriving = self.post.expect(self.room)

    def receive(self) -> Letter:
        """Wait for the next letter and return it."""
        self.expect()
        assert self._arriving is not None
        body = self._arriving()
        self._arriving = None
        return self._opened(body)

    def close(self) -> None:
        """Wait for what is under way."""
        if self._arriving is not None:
            self.receive()
        self.post.settle()

    # -- the reading rank ----------------------------------------------------------------------

    def _pack(self, letters: Sequence[Letter]) -> list[_Packed | None]:
        try:
            return [
                None if rank == SOURCE else self._packed(rank, letter)
                for rank, letter in enumerate(letters)
            ]
        except Exception as error:  # what cannot be pickled raises all kinds
            raise _Unsendable(error) from error

    def _send(self, packed: list[_Packed | None]) -> None:
        need = max((each.size for each in packed if each is not None), default=0)
        follows = _HEAD + need > self.room
        sheet = self._sheet(self.room)
        for rank, each in enumerate(packed):
            if each is not None:
                head = (each.flags, each.real, len(each.described), need if follows else 0)
                _FIELDS.pack_into(sheet.memory, rank * sheet.width, *head)
                if not follows:
                    sheet.write(rank, _HEAD, each)
        self.post.send(sheet.rows)
        if follows:
            self.room = _HEAD + _after(need)
            sheet = self._sheet(_after(need))
            for rank, each in enumerate(packed):
                if each is not None:
                    sheet.write(rank, 0, each)
            self.post.send(sheet.rows)

    def _sheet(self, width: int) -> _Sheet:
        # Two in turn: the one before may still be on its way.
        sheet = self._sheets.pop(0) if len(self._sheets) == 2 else None
        if sheet is None or sheet.width != width:
            sheet = _Sheet(self.size, width)
        self._sheets.append(sheet)
        return sheet

    def _packed(self, rank: int, letter: Letter) -> _Packed:
        flags = (
            _HAS_PART * letter.has_part
            + _LAST * letter.last
            + _MORE * letter.more
            + _FAILED * (letter.failure is not None)
        )
        real = -1 if letter.real is None else letter.real
        if letter.failure is not None:
            return _Packed(flags, real, _pickled(letter.failure), [], None)
        if not letter.has_part:
            return _Packed(flags, real, b"", [], None)
        signature: list[Any] = []
        tensors: list[torch.Tensor] = []
        plain = _sign(letter.part, signature, tensors)
        described = b""
        if not plain or signature != self._signatures[rank]:
            described = _pickled(_described(letter.part))
            self._signatures[rank] = signature if plain else None
            self._layouts[rank] = layout_of(tensors)
        return _Packed(flags, real, described, tensors, self._layouts[rank])

    # -- the others ------------------------------------------------------------------------------

    def _opened(self, body: torch.Tensor) -> Letter:
        flags, real, described, follows = body[:32].view(torch.int64).tolist()
        body = body[_HEAD:]
        if follows:
            self.room = _HEAD + _after(follows)
            body = self.post.expect(_after(follows))()
        text = bytes(as_memory(body[:described]))
        letter = Letter(
            has_part=bool(flags & _HAS_PART),
            last=bool(flags & _LAST),
            more=bool(flags & _MORE),
            real=None if real < 0 else real,
        )
        if flags & _FAILED:
            letter.failure = pickle.loads(text)
        elif letter.has_part:
            if text:
                self._structure = pickle.loads(text)
                infos = [x for _, x in iterate_leaves(self._structure) if _is_info(x)]
                self._layout = layout_of(infos)
            assert self._layout is not None
            begin = _after(described)
            values = iter(unpack(body[begin : begin + self._layout.total], self._layout))
            letter.part = map_leaves(
                lambda leaf: next(values) if _is_info(leaf) else leaf, self._structure
            )
        return letter


class _Sheet:
    """Memory for a letter to every rank."""

    def __init__(self, size: int, width: int) -> None:
        self.width = width
        self.memory = bytearray(size * width)
        self.rows = list(torch.frombuffer(self.memory, dtype=torch.uint8).view(size, width))
        self._places: list[tuple[Layout | None, int, list[torch.Tensor]]] = [(None, 0, [])] * size

    def write(self, rank: int, begin: int, packed: _Packed) -> None:
        """Write description and tensors into a rank's letter, from byte `begin` on."""
        if packed.described:
            start = rank * self.width + begin
            self.memory[start : start + len(packed.described)] = packed.described
        layout = packed.layout
        if layout is None or not packed.tensors:
            return
        begin += _after(len(packed.described))
        known, where, places = self._places[rank]
        if known is not layout or where != begin:
            # Views of the memory, made once for all letters of one structure.
            places = unpack(self.rows[rank][begin : begin + layout.total], layout)
            self._places[rank] = (layout, begin, places)
        for tensor, place in zip(packed.tensors, places, strict=True):
            place.copy_(tensor)


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
    if tree is None or type(tree) in (bool, int):
        into.append((type(tree), tree))
        return True
    if is_sequence(tree):
        into.append((type(tree), len(tree)))
        children: Any = tree
    elif type(tree) is dict:
        into.append((dict, tuple(tree)))
        children = tree.values()
    elif isinstance(tree, Mapping):
        into.append((type(tree), tuple(tree)))
        children = [tree[key] for key in tree]
        # A mapping class of someone's may carry attributes beside its items.
        plain = [_sign(child, into, tensors) for child in children]
        return all(plain) and not getattr(tree, "__dict__", None)
    elif is_record(tree):
        into.append(type(tree))
        children = record_items(tree).values()
    else:
        return False
    plain = [_sign(child, into, tensors) for child in children]
    return all(plain)


def _described(tree: Any) -> Any:
    """Return the tree with a `TensorInformation` for every tensor that travels as bytes."""
    return map_leaves(lambda leaf: get_data_structure(leaf) if _is_dense(leaf) else leaf, tree)


class _Pickler(pickle.Pickler):
    """Pickles of a tensor only what it shows: a slice would drag its whole batch along."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided:
            return NotImplemented
        tensor = obj.detach() if obj.grad_fn is not None else obj
        if tensor.device.type != "cpu":
            tensor = tensor.cpu()
        elif tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
            tensor = tensor.clone()
        if tensor is obj:
            return NotImplemented
        reduce: Any = tensor.__reduce_ex__
        return reduce(pickle.HIGHEST_PROTOCOL)


def _pickled(obj: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()
