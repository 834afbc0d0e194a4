"""String enumerations to which plugins can add members."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, ClassVar, Self

_MEMBER = re.compile(r"[A-Z][A-Z0-9_]*")


class _OpenMeta(type):
    def __getattr__(cls, name: str) -> Any:
        # Any name in capitals is a member, so that user code can compare with a member whose plugin
        # is not installed. That comparison is False.
        if not _MEMBER.fullmatch(name) or cls is OpenEnum:
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}")
        return cls(cls._spell(name))

    def __getitem__(cls, name: str) -> Any:
        if name not in cls:
            raise KeyError(name)
        return cls(name)

    def __iter__(cls) -> Iterator[Any]:
        return map(cls, cls._known)

    def __len__(cls) -> int:
        return len(cls._known)

    def __contains__(cls, item: object) -> bool:
        return cls._spell(item) in cls._known

    def __dir__(cls) -> list[str]:
        return [*super().__dir__(), *map(str.upper, cls._known)]


class OpenEnum(str, metaclass=_OpenMeta):
    """A string enumeration with open membership.

    Any name in capitals is a valid member: `DistributedType.ANYTHING` compares equal only to the string or
    member of that value. Plugins register the members that are listed.
    """

    _known: ClassVar[list[str]] = []
    _upper: ClassVar[bool] = False

    _made: ClassVar[dict[tuple[type, str], Any]] = {}

    @classmethod
    def _spell(cls, name: object) -> str:
        # `str()` of a member may include its class.
        text = name if isinstance(name, str) else str(name)
        return text.upper() if cls._upper else text.lower()

    def __new__(cls, value: object) -> Self:
        # Create one object per member, because user code may compare with `is`.
        spelt = cls._spell(value)
        member: Self = cls._made.setdefault((cls, spelt), str.__new__(cls, spelt))
        return member

    @classmethod
    def register(cls, *values: str) -> None:
        """Add members. Members that exist already are skipped."""
        spelt = dict.fromkeys(map(cls._spell, values))
        cls._known += [one for one in spelt if one not in cls._known]

    @classmethod
    def list(cls) -> list[str]:
        """Return the values of the known members."""
        return [*cls._known]

    #: The member's name, in capitals.
    name = property(str.upper)
    #: The member's value.
    value = property(str.__str__)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self.value!r}>"


class ShownWithClass(OpenEnum):
    """An enumeration that prints as `Class.MEMBER`, except for its `value` and its JSON form."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class DistributedType(ShownWithClass):
    """The kind of setup that runs. The active backend chooses the member."""

    _known: ClassVar[list[str]] = ["NO"]
    _upper: ClassVar[bool] = True


class PrecisionType(OpenEnum):
    """The value of `mixed_precision`."""

    _known: ClassVar[list[str]] = ["no", "fp16", "bf16", "downcast_bf16"]


class LoggerType(OpenEnum):
    """The name of an experiment tracker, or `all`."""

    _known: ClassVar[list[str]] = ["all"]
