"""Members of a class that are those of something it holds."""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from typing import Any


def itself(inner: Any) -> Any:
    """Return what it is given: what `__reduce__` names, of a wrapper that only this run has."""
    return inner


def attribute(path: str, doc: str, *, settable: bool = False) -> Any:
    """Return the property that reads, and if `settable` writes, `path` of an object."""
    holder, _, name = path.rpartition(".")

    def write(self: Any, value: Any) -> None:
        setattr(attrgetter(holder)(self), name, value)

    return property(attrgetter(path), write if settable else None, doc=doc)


def shared(part: str, declared: Any) -> Any:
    """Return the property that is one of a part's class, with its docstring."""
    name = declared.fget.__name__
    return attribute(f"{part}.{name}", declared.__doc__, settable=declared.fset is not None)


def setting(holder: str, cls: Any, name: str, *, settable: bool = False) -> Any:
    """Return the property that is a field of a settings object, with its help text."""
    (help_text,) = (f.metadata["description"] for f in dataclasses.fields(cls) if f.name == name)
    return attribute(f"{holder}.{name}", help_text, settable=settable)
