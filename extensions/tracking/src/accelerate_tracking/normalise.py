"""One normalisation before the fan-out: what every tracker gets is plain Python.

NumPy and torch are recognised only if the script has imported them; nothing is imported here.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import enum
import errno
import numbers
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from decimal import Decimal
from typing import Any

from accelerate_core.plugin import warn

#: Tensors and arrays in a config are written out up to this many elements.
CONFIG_ELEMENTS = 1024

_MISSING: Any = object()
_TWICE = "because two entries have this name after joining with '/'"


class Reporter:
    """Says once per key what was not logged, and why."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def first(self, what: str) -> bool:
        """Tell whether this is said for the first time."""
        new = what not in self._said
        self._said.add(what)
        return new

    def report(self, key: str, problem: str) -> None:
        """Warn about `key` unless that has been done before.

        Args:
            problem: what is the matter with the value.
        """
        if self.first(key):
            warn(f"Not logged: {key!r} {problem}.")

    def note(self, text: str) -> None:
        """Warn with `text` unless that has been done before."""
        if self.first(text):
            warn(text)


def normalise_values(
    values: Mapping[Any, Any], reporter: Reporter, pending: dict[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, object]]:
    """Make the values of one `log` call plain.

    Nested mappings are joined by `/`; numbers of any library and dtype, and tensors and arrays of
    one element, become Python numbers. Strings stay; paths and enums become strings.

    Args:
        reporter: told which keys clash or hold None.
        pending: if given, one-element tensors of a device are put here unread, by key, and are
            None among the plain values; else reading them waits for the device.

    Returns:
        The plain values, and those that are none, which a tracker may take: tensors and arrays of
        several elements, containers, objects of other packages.
    """
    plain: dict[str, Any] = {}
    other: dict[str, object] = {}
    tensor = getattr(sys.modules.get("torch"), "Tensor", ())
    for key, value in _flatten(values, "", reporter, ()):
        if key in plain or key in other:
            reporter.report(key, _TWICE)
            continue
        if type(value) is float:  # the common case, and the step waits
            plain[key] = value
            continue
        if isinstance(value, tensor):
            if pending is not None and _is_on_device(value):
                plain[key] = None
                pending[key] = value
                continue
            number = _element(value)
        else:
            number = scalar(value)
        if number is not _MISSING:
            plain[key] = number
        elif value is None:
            reporter.report(key, "is None, which no tracker can plot; leave the key out")
        else:
            other[key] = value
    return plain, other


class NotTaken(ValueError):
    """A library did not take some values: it is said once, and the tracker goes on.

    Args:
        problems: what was wrong, by key.
    """

    def __init__(self, problems: Mapping[str, object]) -> None:
        super().__init__("; ".join(f"{k!r} {p}" if k else str(p) for k, p in problems.items()))
        self.problems = problems


def each(values: Mapping[str, Any], write: Callable[[str, Any], object]) -> None:
    """Hand values over one by one; one that a library refuses does not cost the others.

    Args:
        write: hands one value over.

    Raises:
        NotTaken: with the keys of those that were refused.
    """
    problems: dict[str, object] = {}
    for key, value in values.items():
        try:
            write(key, value)
        except Exception as error:
            if is_ill(error):
                raise
            problems[key] = f"({type(error).__name__}: {error})"
    if problems:
        raise NotTaken(problems)


#: Of an OSError: what is wrong with one entry (a name, a file), not with the disk or the network.
_OF_ONE_ENTRY = {errno.ENOENT, errno.ENAMETOOLONG, errno.EINVAL, errno.EISDIR, errno.ENOTDIR}


#: What a tracker may raise: some libraries leave the process where something is wrong.
RAISED = (Exception, SystemExit)


def is_ill(error: BaseException) -> bool:
    """Tell whether what a tracker raised says that nothing further will work either."""
    if isinstance(error, SystemExit):
        return True
    return isinstance(error, OSError) and error.errno not in _OF_ONE_ENTRY


def text_of(value: str) -> str:
    """Return a string that can be encoded: names of files may hold bytes that are no text."""
    if value.isascii():
        return value
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def split(values: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str], dict[str, Any]]:
    """Part what `log` gets into numbers (as floats), strings, and objects that were accepted."""
    numbers_ = {}
    texts = {}
    others = {}
    for key, value in values.items():
        if isinstance(value, str):
            texts[key] = value
        elif isinstance(value, (bool, int, float)):
            numbers_[key] = as_float(value)
        else:
            others[key] = value
    return numbers_, texts, others


def as_float(value: float) -> float:
    """Return a number as a float; an int beyond what a float holds as an infinity."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def normalise_config(config: object, reporter: Reporter) -> dict[str, Any]:
    """Make a run's configuration plain.

    Args:
        config: a mapping, a dataclass instance, an `argparse.Namespace`, or an object with
            `model_dump` or `to_dict`. Nested ones are joined by `/`; sequences, sets and small
            tensors become lists; paths, dtypes, devices and dates strings; enums their values, or
            names; functions and classes their qualified names; None stays.
        reporter: told which keys cannot be written down.

    Raises:
        TypeError: `config` is none of those.
    """
    fields = _fields(config)
    if fields is None:
        raise TypeError(
            f"A tracking config must be a dict, a dataclass or a namespace, "
            f"not {type(config).__name__}."
        )
    plain: dict[str, Any] = {}
    for key, value in _flatten(fields, "", reporter, (), config=True):
        if key in plain:
            reporter.report(key, _TWICE)
            continue
        try:
            plain[key] = _written(value, ())
        except _NotPlain:
            shape = getattr(value, "shape", None)
            what = type(value).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")
            reporter.report(key, f"cannot be written down ({what})")
    return plain


def scalar(value: object) -> Any:
    """Return `value` as a Python bool, int, float or str; a private marker if it is none."""
    kind = type(value)
    if kind is float or kind is int or kind is bool:
        return value
    if isinstance(value, enum.Enum):
        inside = scalar(value.value)
        return value.name if inside is _MISSING else inside
    if isinstance(value, str):
        return text_of(value if kind is str else str(value))
    if isinstance(value, os.PathLike):
        return text_of(os.fsdecode(os.fspath(value)))
    if _is_array(value):
        return _element(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, (numbers.Real, Decimal)):
        return float(value)
    return _MISSING


def is_scalar(value: object) -> bool:
    """Whether what `scalar` returned is a plain value, or None."""
    return value is not _MISSING


def is_foreign(value: object) -> bool:
    """Whether `value` is, or holds, an object for a tracker: not of Python, NumPy or torch."""
    if isinstance(value, Mapping):
        return any(is_foreign(item) for item in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(is_foreign(item) for item in value)
    if value is None or _is_array(value):
        return False
    return type(value).__module__.partition(".")[0] not in {"builtins", "numpy", "torch"}


def made_by(value: object, packages: tuple[str, ...]) -> bool:
    """Whether `value` is an object of one of these packages, or a container of such alone."""
    if isinstance(value, Mapping):
        return bool(value) and all(made_by(item, packages) for item in value.values())
    if isinstance(value, (list, tuple)):
        return bool(value) and all(made_by(item, packages) for item in value)
    return type(value).__module__.partition(".")[0] in packages


def _flatten(
    values: Mapping[Any, Any],
    prefix: str,
    reporter: Reporter,
    parents: tuple[int, ...],
    config: bool = False,
) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{prefix}{name.value if isinstance(name, enum.Enum) else name}"
        if not key.isascii():
            key = text_of(key)
        if config:
            nested = _fields(value)
        else:
            nested = value if isinstance(value, Mapping) else None
        if nested is None:
            yield key, value
        elif id(value) in parents:
            reporter.report(key, "because it contains itself")
        elif nested or not config:
            yield from _flatten(nested, f"{key}/", reporter, (*parents, id(value)), config)
        else:
            yield key, {}


def _fields(value: object) -> Mapping[Any, Any] | None:
    """Return the named fields of a mapping, dataclass, namespace or model, else None."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, argparse.Namespace):
        return vars(value)
    for method in ("model_dump", "to_dict"):
        if callable(getattr(value, method, None)):
            try:
                dumped = getattr(value, method)()
            except Exception:  # it means something else by that name; its text may still do
                return None
            return dumped if isinstance(dumped, Mapping) else None
    return None


class _NotPlain(ValueError):
    """A value of a config cannot be written down."""


def _written(value: object, parents: tuple[int, ...]) -> Any:
    """Return a value of a config as plain data, or raise `_NotPlain`."""
    number = None if value is None else scalar(value)
    if number is not _MISSING:
        return number
    if id(value) in parents:
        raise _NotPlain
    inside = (*parents, id(value))
    if _is_array(value):
        with contextlib.suppress(RuntimeError, TypeError, ValueError):
            if _count(value) <= CONFIG_ELEMENTS:
                return _written(value.tolist(), ())  # type: ignore[attr-defined]
        raise _NotPlain
    fields = _fields(value)
    if fields is not None:
        return {str(key): _written(item, inside) for key, item in fields.items()}
    if isinstance(value, (Sequence, Set)) and not isinstance(value, (bytes, bytearray)):
        items = [_written(item, inside) for item in value]
        # A set has no order of its own; ranks and runs should agree on one.
        return sorted(items, key=repr) if isinstance(value, Set) else items
    return _text(value)


def _text(value: object) -> Any:
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    name = getattr(value, "__qualname__", None)
    if callable(value) and isinstance(name, str):
        return f"{getattr(value, '__module__', '?')}.{name}"
    kind = type(value)
    # The default repr is an address: it differs between runs and says nothing.
    says_nothing = kind.__repr__ is object.__repr__ and kind.__str__ is object.__str__
    if says_nothing or callable(getattr(value, "__next__", None)):
        raise _NotPlain
    return str(value)


def is_tensor(value: object) -> bool:
    """Whether `value` is a tensor of torch, which may not be imported, or be half imported."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def _is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    arrays = (getattr(numpy, "ndarray", ()), getattr(numpy, "generic", ()))
    return is_tensor(value) or isinstance(value, arrays)


def _is_on_device(value: Any) -> bool:
    return not value.is_cpu and not value.is_meta and bool(value.numel() == 1)


def _element(value: Any) -> Any:
    try:
        if value.ndim == 0:
            # Of a tensor on the CPU: `item` would let go of the interpreter, and wait for it.
            item = value.tolist()
        elif _count(value) != 1:
            return _MISSING
        else:
            item = value.item()
        if isinstance(item, bool | int | float | str):
            return item
        # The widest NumPy floats come out of `.item()` as themselves.
        return float(item) if isinstance(item, numbers.Real) or _is_array(item) else _MISSING
    except (RuntimeError, TypeError, ValueError):
        # A meta tensor, for one, has a shape but no value.
        return _MISSING


def _count(value: Any) -> int:
    return int(value.numel() if is_tensor(value) else value.size)
