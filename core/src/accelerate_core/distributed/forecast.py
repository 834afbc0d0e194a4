"""`Forecast`: the size of the next message, computed from the messages before it.

Ranks whose structures differ would send messages of different sizes, with which process groups hang, abort
the process or return garbage. So a message has a size that all ranks know before they look at what they send.
It follows from the earlier messages, which were equal on all ranks. See docs/decisions/041.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Messages have at least this size.
FLOOR = 1024
#: Up to this size, messages are padded to a power of two, so that sizes may vary.
PADDED = 2**16
#: Texts of varying lengths, for example, have ever new structures.
_REMEMBERED = 1000

#: A form, the size of the message, and the part of it that was needed.
Message = tuple[Hashable, int, int]


@dataclass(eq=False, slots=True)
class Forecast:
    """Predicts the form and the size of the next message.

    A loop calls the same collectives in the same order again and again. So the prediction is what followed
    after the same call last time. Every rank computes the same prediction, because it only depends on calls
    that were equal on all ranks.

    Args:
        form: a dtype and an operation, or None if messages are bytes.
    """

    form: Any = None
    #: The size of the next message.
    room: int = FLOOR
    _latest: Sequence[Hashable] = ()
    #: The form, room and size of the message that followed a structure, or a verb if the structure is new.
    _followers: dict[Hashable, Message] = field(default_factory=dict)

    def record(self, label: str, digest: int, form: Hashable, size: int) -> None:
        """Note that all ranks made this call, and needed a message of this form and size."""
        if len(self._followers) > _REMEMBERED:
            self._followers.clear()
        for key in self._latest:
            self._followers[key] = _message(form, size, self._followers.get(key))
        self._latest = digest, label
        following = self._followers.get(digest) or self._followers.get(label)
        # Expect a repetition if nothing has followed such a call yet.
        self.form, self.room, _ = following or _message(form, size, None)


def _message(form: Hashable, size: int, earlier: Message | None) -> Message:
    """Return the message in which the next one of this form and size is expected to fit."""
    earlier_form, room, earlier_size = earlier or (form, 0, size)
    if size > PADDED:
        # Padding is expensive here. A size that varies is sent separately, after a small message.
        return form, -(-size // 16) * 16 if size == earlier_size else FLOOR, size
    if form == earlier_form and size <= room <= PADDED:
        return form, room, size
    return form, max(FLOOR, 1 << (size - 1).bit_length()), size
