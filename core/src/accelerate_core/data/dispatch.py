"""Dispatching: one rank reads, every rank receives its part."""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from accelerate_core.collectives import Communicator
from accelerate_core.data.steps import NOTHING, Step, StepReader
from accelerate_core.errors import AccelerateError

__all__ = ["DispatchError", "Message", "ObjectTransport", "Transport", "receive_steps"]

SOURCE = 0


class DispatchError(AccelerateError, RuntimeError):
    """The rank that reads the data for all failed in a way that cannot be sent as it is."""


@dataclass(slots=True)
class Message:
    """What a rank receives per global step.

    `part` is `NOTHING` at the end of the data. `more`: another message will follow.
    """

    part: Any = None
    has_part: bool = False
    last: bool = False
    more: bool = False
    real: int | None = None
    failure: Exception | None = None


class Transport(Protocol):
    """Carries one message per rank from the reading rank; all ranks call it in step."""

    def exchange(self, messages: Sequence[Message] | None) -> Message:
        """Give every rank its message (None on the ranks that do not read); return this one's."""


class ObjectTransport:
    """A transport over pickled objects; each rank's message holds its own part and no more."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def exchange(self, messages: Sequence[Message] | None) -> Message:
        """See `Transport`. The reading rank keeps its own message as it is."""
        if messages is None:
            data = self.comm.scatter_object(None, src=SOURCE)
            message: Message = pickle.loads(data)
            return message
        packed: list[bytes] = []
        try:
            packed = [b"" if r == SOURCE else _pack(m) for r, m in enumerate(messages)]
        except Exception as error:
            messages = [Message(failure=error)] * self.comm.size
            failure = Message(failure=sendable(error))
            packed = [b"" if r == SOURCE else _pack(failure) for r in range(self.comm.size)]
        self.comm.scatter_object(packed, src=SOURCE)
        return messages[SOURCE]


class _PartPickler(pickle.Pickler):
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


def _pack(message: Message) -> bytes:
    buffer = io.BytesIO()
    _PartPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getvalue()


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


def receive_steps(
    reader: StepReader,
    open_batches: Callable[[], Iterator[Any]],
    skip: int,
    comm: Communicator,
    transport: Transport,
    shard_of_rank: Sequence[int],
) -> Iterator[tuple[Any, bool, int | None]]:
    """Yield `(part, last, real)` of this rank for every step; the reading rank serves all.

    `open_batches` is called on the reading rank only. `shard_of_rank[r]` says which part rank r
    gets: ranks that work on the same samples share one.
    """
    steps = _guarded(reader, open_batches, skip) if comm.rank == SOURCE else None
    more = True
    while more:
        if steps is None:
            message = transport.exchange(None)
        else:
            message = transport.exchange(_messages(next(steps), shard_of_rank))
        if message.failure is not None:
            raise message.failure
        more = message.more
        if message.has_part:
            yield message.part, message.last, message.real


def _guarded(
    reader: StepReader, open_batches: Callable[[], Iterator[Any]], skip: int
) -> Iterator[Step | Exception | None]:
    """Yield steps, an exception in the place of the step it prevented, None for no data at all."""
    more = True
    try:
        for step in reader.steps(open_batches(), skip):
            more = step.more
            yield step
    except Exception as error:
        yield error
        return
    if more:
        yield None


def _messages(step: Step | Exception | None, shard_of_rank: Sequence[int]) -> list[Message]:
    if step is None:
        return [Message() for _ in shard_of_rank]
    if isinstance(step, Exception):
        copy = sendable(step)
        own = Message(failure=step)
        return [
            own if rank == SOURCE else Message(failure=copy) for rank in range(len(shard_of_rank))
        ]
    messages = []
    for shard in shard_of_rank:
        part = step.parts[shard]
        has_part = part is not NOTHING
        messages.append(
            Message(part if has_part else None, has_part, step.last[shard], step.more, step.real)
        )
    return messages
