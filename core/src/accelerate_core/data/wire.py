"""Messages from the rank that reads to the others, as bytes: one collective per global step.

A message is a head of fixed size, the description of the part if it is not that of the message
before, and the part's tensors. All ranks know the room a message may take; one that needs more
announces the rest in its head, which follows in a second collective, and the room grows to it. So
batches of one structure take one collective each, and the structure travels once.
"""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accelerate_core.collectives import Communicator
from accelerate_core.collectives.packing import Layout, layout_of, pack, unpack
from accelerate_core.errors import AccelerateError
from accelerate_core.nested import (
    TensorInformation,
    get_data_structure,
    is_record,
    is_sequence,
    iterate_leaves,
    map_leaves,
    record_items,
)

__all__ = ["SOURCE", "DispatchError", "Letter", "Wire", "sendable"]

SOURCE = 0  # the rank that reads
_HEAD = 64  # bytes: eight int64
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
    described: bytes  # empty: as in the message before
    tensors: list[torch.Tensor]
    layout: Layout | None

    @property
    def size(self) -> int:
        return _after(len(self.described)) + (self.layout.total if self.layout else 0)


def _after(size: int) -> int:
    """Return where tensors begin behind a description of so many bytes."""
    return -(-size // 64) * 64


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


class Wire:
    """One end of the connection between the reading rank and one of the others.

    Args:
        comm: the ranks; each calls `exchange` once per global step.
        source: the rank that reads.
        room: bytes to start with.
    """

    def __init__(self, comm: Communicator, source: int = SOURCE, room: int = 4096) -> None:
        self.comm = comm
        self.source = source
        self.room = room
        self._device = torch.device("cpu") if comm.device.type == "cpu" else comm.device
        self._signatures: list[Any] = [None] * comm.size
        self._layouts: list[Layout | None] = [None] * comm.size
        self._structure: Any = None
        self._layout: Layout | None = None
        self._out: torch.Tensor | None = None

    def exchange(self, letters: Sequence[Letter] | None) -> Letter:
        """Send every rank its letter (None on the ranks that do not read); return this one's.

        The reading rank's own letter is returned as it is.
        """
        if letters is None:
            return self._receive()
        try:
            self._send(self._pack(letters))
        except _Unsendable as error:
            self._send(self._pack([Letter(failure=sendable(error.reason))] * self.comm.size))
            return Letter(failure=error.reason)
        return letters[self.source]

    # -- the reading rank ----------------------------------------------------------------------

    def _pack(self, letters: Sequence[Letter]) -> list[_Packed | None]:
        try:
            return [
                None if rank == self.source else self._packed(rank, letter)
                for rank, letter in enumerate(letters)
            ]
        except Exception as error:  # what cannot be pickled raises all kinds
            raise _Unsendable(error) from error

    def _send(self, packed: list[_Packed | None]) -> None:
        need = max((each.size for each in packed if each is not None), default=0)
        follows = _HEAD + need > self.room
        rows = self._rows(self.room)
        for row, each in zip(rows, packed, strict=True):
            if each is None:
                continue
            head = [each.flags, each.real, len(each.described), need if follows else 0, 0, 0, 0, 0]
            row[:_HEAD].view(torch.int64).copy_(torch.tensor(head))
            if not follows:
                _write(row[_HEAD:], each)
        self._scatter(rows)
        if follows:
            self.room = _HEAD + _after(need)
            rows = self._rows(_after(need))
            for row, each in zip(rows, packed, strict=True):
                if each is not None:
                    _write(row, each)
            self._scatter(rows)

    def _rows(self, width: int) -> torch.Tensor:
        out = self._out
        if out is None or out.shape[1] < width:
            out = torch.empty(self.comm.size, width, dtype=torch.uint8)
            self._out = out
        return out[:, :width]

    def _scatter(self, rows: torch.Tensor) -> None:
        parts = [row.to(self._device) for row in rows]
        self.comm.scatter(parts, parts[self.source], self.source)

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

    def _receive(self) -> Letter:
        body = self._receive_bytes(self.room)
        flags, real, described, follows = body[:_HEAD].view(torch.int64).tolist()[:4]
        body = body[_HEAD:]
        if follows:
            body = self._receive_bytes(_after(follows))
            self.room = _HEAD + _after(follows)
        text = body[:described].numpy().tobytes() if described else b""
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

    def _receive_bytes(self, size: int) -> torch.Tensor:
        # New memory for each: the tensors of a part are views of it.
        like = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self.comm.scatter(None, like, self.source).cpu()


def _write(row: torch.Tensor, packed: _Packed) -> None:
    if packed.described:
        text = torch.frombuffer(bytearray(packed.described), dtype=torch.uint8)
        row[: len(text)] = text
    if packed.layout is not None and packed.tensors:
        begin = _after(len(packed.described))
        target = row[begin : begin + packed.layout.total]
        if target.storage_offset() % packed.layout.alignment:
            target.copy_(pack(packed.tensors, packed.layout, torch.device("cpu")))
            return
        for tensor, place in zip(packed.tensors, unpack(target, packed.layout), strict=True):
            place.copy_(tensor.detach())


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
