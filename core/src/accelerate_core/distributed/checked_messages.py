"""Send tensors together with a digest of their structure, so that all ranks notice a mismatch.

The digest travels in the same message as the tensors. See docs/decisions/041-checked-messages.md.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from accelerate_core.distributed.forecast import FLOOR, PADDED
from accelerate_core.distributed.message_history import Form
from accelerate_core.distributed.packing import Layout, aligned, bytes_of, layout_of, pack
from accelerate_core.distributed.structure import EXACT, Rule, digest_of, row_text, rows
from accelerate_core.distributed.torch_collectives import ReduceOp, as_bytes
from accelerate_core.errors import DistributedOperationException

if TYPE_CHECKING:
    from accelerate_core.distributed.communicator import Communicator

_DIGEST = 8  # bytes
_ALIGNMENT = torch.complex128.itemsize
#: Each bit of the digest is two numbers in a reduction.
_NUMBERS = 16 * _DIGEST
#: A single tensor of more bytes is sent alone, after a small message, because adding the digest would
#: copy it.
_COPIED = 2**20
#: An error that concerns more leaves or ranks shows only those that differ, or one of each kind.
_SHOWN = 8

_BROADCAST_FORM: Form = (torch.uint8, "max")


@dataclass(eq=False)
class Call:
    """One call of a collective on a structure.

    Args:
        label: the name of the function, with the arguments that must be equal on all ranks.
        key: the structure, from `structure.read`.
        rule: what of it must be equal.
    """

    comm: Communicator
    label: str
    key: Hashable
    rule: Rule = EXACT
    digest: int = field(init=False)

    def __post_init__(self) -> None:
        history = self.comm.history
        if history.arriving:
            history.check_arrived()
        self.digest = digest_of(self.label, self.key, self.rule)
        history.digest = hash((history.digest, self.digest))
        if self.comm.debug and not self.comm.all_equal(self.digest):
            self._refuse_together()

    # --- checks -------------------------------------------------------------------------------

    def check_gathered(self, digests: torch.Tensor) -> None:
        """Raise an error if the ranks sent different digests."""

        def differ(values: list[int]) -> bool:
            return any(value != self.digest for value in values)

        self._check(digests, differ)

    def check_reduced(self, numbers: torch.Tensor, op: ReduceOp) -> None:
        """Raise an error if the ranks sent different digests into a reduction."""

        def differ(values: list[float]) -> bool:
            pairs = zip(values, _numbers(self.digest), strict=True)
            if op == "min":
                return any(sent and not value for value, sent in pairs)
            return any(value and not sent for value, sent in pairs)

        self._check(numbers, differ)

    def _check(self, numbers: torch.Tensor, differ: Callable[[list[Any]], bool]) -> None:
        if numbers.device.type == "cpu":
            if differ(numbers.tolist()):
                self._refuse_together()
            return
        module: Any = getattr(torch, numbers.device.type, None)
        if not hasattr(module, "Event"):
            return  # on devices without events, reading would run all pending work

        def check_later(values: torch.Tensor) -> None:
            if differ(values.tolist()):
                self._refuse_alone()

        arrived = module.Event()
        values = numbers.to("cpu", non_blocking=True)
        arrived.record()
        self.comm.history.arriving.append((arrived, values, check_later))

    def _refuse_together(self) -> NoReturn:
        """Raise an error that shows the structures of all ranks, which all call this."""
        reports = self.comm.gather_object((self.label, self._row_texts()))
        raise DistributedOperationException(
            f"{self._verb}: the processes passed tensors that do not match.\n{_lines(reports)}\n"
            f"{self._advice}"
        )

    def _refuse_alone(self) -> NoReturn:
        passed = ", ".join(self._row_texts()) or "no tensor"
        raise DistributedOperationException(
            f"{self._verb}: the processes passed tensors that do not match. This is about an earlier call, "
            f"in which process {self.comm.rank} called {self.label} with {passed}. To see at once "
            f"what each process passes, set ACCELERATE_DEBUG_MODE=1 or launch with --debug.\n"
            f"{self._advice}"
        )

    @property
    def _verb(self) -> str:
        return self.label.partition("(")[0]

    @property
    def _advice(self) -> str:
        return _ADVICE.get(self._verb, _DEFAULT_ADVICE)

    def _row_texts(self) -> list[str]:
        return [row_text(path, leaf) for path, leaf in rows(self.key)]


_ADVICE = {
    "gather": "Pad the tensors to one shape with pad_across_processes, or use gather_object.",
    "gather_uneven": "Only dimension 0 may differ between the processes.",
    "pad_across_processes": "Every process must pass the same structure, and each tensor must have the "
    "padded dimensions on all processes or on none.",
}
_DEFAULT_ADVICE = "Structures, shapes and dtypes must be equal on all processes."


def _lines(reports: Sequence[tuple[str, list[str]]]) -> str:
    """Return a line for each process, or with many processes for each different report."""
    several = len({label for label, _ in reports}) > 1
    shared: set[str] = set()
    if max(len(texts) for _, texts in reports) > _SHOWN:
        shared = set.intersection(*(set(texts) for _, texts in reports))
    ranks: dict[str, list[int]] = {}
    for rank, (label, texts) in enumerate(reports):
        shown = [text for text in texts if text not in shared]
        rest = [f"and {len(texts) - len(shown)} equal ones"] if len(shown) < len(texts) else []
        line = ", ".join([*shown, *rest]) or "no tensor"
        ranks.setdefault(f"{label} of {line}" if several else line, []).append(rank)
    if len(reports) > _SHOWN:
        return "\n".join(
            f"  - process{'es' * (len(those) > 1)} {', '.join(map(str, those))}: {line}"
            for line, those in ranks.items()
        )
    pairs = sorted((rank, line) for line, those in ranks.items() for rank in those)
    return "\n".join(f"  - process {rank}: {line}" for rank, line in pairs)


# --- messages ---------------------------------------------------------------------------------


def gather(
    call: Call, tensors: Sequence[torch.Tensor], *, to_host: bool = False
) -> tuple[torch.Tensor, Layout]:
    """Send the tensors of all ranks to all ranks.

    Args:
        tensors: they have the same shapes and dtypes on all ranks that pass the check of the call.
        to_host: the caller reads the result on the host, so the check can wait for it.

    Returns:
        A table of bytes with one row per rank, and the layout of the tensors in a row.
    """
    comm = call.comm
    layout = layout_of(tensors)
    forecast = comm.history.gathers
    is_alone = len(tensors) == 1 and layout.total > _COPIED
    fits = not is_alone and layout.total + _DIGEST <= forecast.room

    sent = bytes_of(tensors, layout, comm.device) if fits else []
    free = forecast.room - sum(map(len, sent))
    table = _gather_rows(comm, torch.cat([*sent, _tail(call.digest, free, comm.device)]), to_host)
    call.check_gathered(table.view(torch.int64)[:, -1])
    if not fits and layout.total:
        table = _gather_rows(comm, pack(tensors, layout, comm.device), to_host)
    size = FLOOR if is_alone else layout.total + _DIGEST
    forecast.record(call.label, call.digest, None, size)
    return table, layout


def _gather_rows(comm: Communicator, message: torch.Tensor, to_host: bool) -> torch.Tensor:
    gathered = comm.gather(message)
    if to_host:
        gathered = gathered.cpu()
    return aligned(gathered, _ALIGNMENT).view(comm.size, len(message))


@lru_cache(maxsize=64)
def _tail(digest: int, size: int, device: torch.device) -> torch.Tensor:
    """Return zeros that fill up a message of bytes, with the digest at the end."""
    tail = torch.zeros(size, dtype=torch.uint8, device="cpu")
    tail[-_DIGEST:] = as_bytes(torch.tensor([digest], device="cpu"))
    return tail.to(device)


def reduce(call: Call, groups: Mapping[Form, Sequence[torch.Tensor]]) -> dict[Form, torch.Tensor]:
    """Reduce flat tensors of all ranks. Returns the results of each form in one tensor."""
    comm = call.comm
    forecast = comm.history.reductions
    first: Form = forecast.form
    dtype, op = first
    room = forecast.room // dtype.itemsize
    counts = {form: sum(map(len, group)) for form, group in groups.items()}
    fits = first in groups and counts[first] + _NUMBERS <= room

    sent, count = (groups[first], counts[first]) if fits else ((), 0)
    tail = _tail_of_numbers(call.digest, room - count, dtype, comm.device)
    total = comm.reduce(torch.cat([*sent, tail]), op, overwrite=True)
    call.check_reduced(total[room - _NUMBERS :], op)

    results = {}
    if fits:
        # A small result doesn't keep the memory of the whole message.
        results[first] = total[:count].clone() if total.nbytes <= PADDED else total[:count]
    for form, group in groups.items():
        if form not in results:
            results[form] = comm.reduce(torch.cat([*group]), form[1], overwrite=True)
    expected = next(iter(groups), first)
    size = (counts.get(expected, 0) + _NUMBERS) * expected[0].itemsize
    forecast.record(call.label, call.digest, expected, size)
    return results


@lru_cache(maxsize=64)
def _tail_of_numbers(
    digest: int, size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return zeros that fill up a message for a reduction, with the digest at the end."""
    tail = torch.zeros(size, dtype=dtype, device="cpu")
    tail[size - _NUMBERS :] = torch.tensor(_numbers(digest), dtype=dtype, device="cpu")
    return tail.to(device)


@lru_cache(maxsize=1024)
def _numbers(digest: int) -> list[int]:
    """Return 0 and 1 for each bit of the digest that is 1, and 1 and 0 for each other one.

    If two ranks send different digests, then at some bit one of them sends 0 and 1, the other 1 and 0.
    After a sum, mean or maximum neither number is 0, and after a minimum both are, whatever the dtype.
    """
    bits = [digest >> position & 1 for position in range(8 * _DIGEST)]
    return [number for bit in bits for number in (1 - bit, bit)]


def broadcast(call: Call, tensors: Sequence[torch.Tensor], src: int) -> tuple[torch.Tensor, Layout]:
    """Send the tensors of rank `src` to all ranks; return them as bytes with their layout.

    In a broadcast, the sender learns nothing about the other ranks. So little data is sent in a reduction
    to which the other ranks contribute zeros. A small message precedes more data.
    """
    comm = call.comm
    layout = layout_of(tensors)
    if layout.total > PADDED:
        reduce(call, {})
        return comm.broadcast(pack(tensors, layout, comm.device), src), layout
    if comm.rank == src:
        sent = pack(tensors, layout, comm.device)
    else:
        sent = torch.zeros(layout.total, dtype=torch.uint8, device=comm.device)
    return reduce(call, {_BROADCAST_FORM: [sent]})[_BROADCAST_FORM], layout
