"""Convert logged values and configs to plain Python before they are sent to the trackers.

This module imports neither NumPy nor torch. It recognises their objects if the script has imported
them.
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

#: Largest number of elements of tensors and arrays in a config.
CONFIG_ELEMENTS = 1024

_MISSING: Any = object()
_TWICE = "because two entries have this name after nested keys were joined with '/'"


class Reporter:
    """Warns once per key about values that were not logged."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def first(self, what: str) -> bool:
        """Return True on the first call with `what`, and False after that."""
        new = what not in self._said
        self._said.add(what)
        return new

    def report(self, key: str, problem: str) -> None:
        """Warn that `key` was not logged, once per key.

        Args:
            problem: why, such as "is None" or "because it contains itself".
        """
        if self.first(key):
            warn(f"Not logged: {key!r} {problem}.")

    def note(self, text: str) -> None:
        """Warn with `text`, once per text."""
        if self.first(text):
            warn(text)


def normalise_values(
    values: Mapping[Any, Any], reporter: Reporter, pending: dict[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, object]]:
    """Convert the values of one `log` call to plain Python.

    Keys of nested mappings are joined with `/`. Numbers of any library and dtype, and tensors and
    arrays with one element, become Python numbers. Paths and enums become strings.

    Args:
        reporter: warns about keys that clash or whose value is None.
        pending: if given, one-element tensors on a device are not read. They are added to this
            dict, and are None in the result. Without it, reading them waits for the device.

    Returns:
        The plain values, and the other values, which some trackers may accept: tensors and arrays
        with several elements, containers, and objects of other packages.
    """
    plain: dict[str, Any] = {}
    other: dict[str, object] = {}
    tensor = getattr(sys.modules.get("torch"), "Tensor", ())
    for key, value in _flatten(values, "", reporter, ()):
        if key in plain or key in other:
            reporter.report(key, _TWICE)
            continue
        if type(value) is float:  # fast path for the common case, because the step waits for this
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
            reporter.report(key, "is None, which no tracker can plot. Leave out the key")
        else:
            other[key] = value
    return plain, other


class NotTaken(ValueError):
    """A library did not accept some values. A warning says so once, and the tracker continues.

    Args:
        problems: key -> what was wrong.
    """

    def __init__(self, problems: Mapping[str, object]) -> None:
        super().__init__("; ".join(f"{k!r} {p}" if k else str(p) for k, p in problems.items()))
        self.problems = problems


def each(values: Mapping[str, Any], write: Callable[[str, Any], object]) -> None:
    """Write values one by one, so that one refused value doesn't lose the others.

    Args:
        write: writes one value.

    Raises:
        NotTaken: the library refused some values. It has their keys.
    """
    problems: dict[str, object] = {}
    for key, value in values.items():
        try:
            write(key, value)
        except Exception as error:
            if is_broken(error):
                raise
            problems[key] = f"({type(error).__name__}: {error})"
    if problems:
        raise NotTaken(problems)


#: Error numbers caused by a single entry, such as its name, and not by the disk or the network.
_SINGLE_ENTRY = {errno.ENOENT, errno.ENAMETOOLONG, errno.EINVAL, errno.EISDIR, errno.ENOTDIR}


#: What a tracker may raise. Some libraries exit the process when something is wrong.
RAISED = (Exception, SystemExit)


def is_broken(error: BaseException) -> bool:
    """Return whether an error of a tracker means that its later calls will fail too."""
    if isinstance(error, SystemExit):
        return True
    return isinstance(error, OSError) and error.errno not in _SINGLE_ENTRY


def text_of(value: str) -> str:
    """Return a string that can be encoded. File names may contain undecodable bytes."""
    if value.isascii():
        return value
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def split(values: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str], dict[str, Any]]:
    """Split the values of `log` into numbers (as floats), strings, and other accepted objects."""
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
    """Return a number as a float, or as an infinity if it is too large."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def normalise_config(config: object, reporter: Reporter) -> dict[str, Any]:
    """Convert the configuration of a run to plain Python.

    Keys of nested configs are joined with `/`. Sequences, sets and small tensors become lists.
    Paths, dtypes, devices and dates become strings. Enums become their values or names. Functions
    and classes become their qualified names. None is kept.

    Args:
        config: a mapping, a dataclass instance, an `argparse.Namespace`, or an object with
            `model_dump` or `to_dict`.
        reporter: warns about keys whose values cannot be stored.

    Raises:
        TypeError: `config` has another type.
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
            reporter.report(key, f"is a {what}, which a config cannot store")
    return plain


def scalar(value: object) -> Any:
    """Return `value` as a Python bool, int, float or str, or a marker for `is_scalar`."""
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
    """Return whether a result of `scalar` is a plain value or None."""
    return value is not _MISSING


def is_third_party(value: object) -> bool:
    """Return whether `value` is or contains an object not from Python, NumPy or torch."""
    if isinstance(value, Mapping):
        return any(is_third_party(item) for item in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(is_third_party(item) for item in value)
    if value is None or _is_array(value):
        return False
    return type(value).__module__.partition(".")[0] not in {"builtins", "numpy", "torch"}


def made_by(value: object, packages: tuple[str, ...]) -> bool:
    """Return whether `value` is an object of these packages, or a container with only those."""
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
            except Exception:  # an unrelated method; the object's string may still be usable
                return None
            return dumped if isinstance(dumped, Mapping) else None
    return None


class _NotPlain(ValueError):
    """A config has a value that cannot be stored."""


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
        # A set is unordered, but the result should be the same on all ranks and in all runs.
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
    # The default repr is only an address, which differs between runs.
    default_repr = kind.__repr__ is object.__repr__ and kind.__str__ is object.__str__
    if default_repr or callable(getattr(value, "__next__", None)):
        raise _NotPlain
    return str(value)


def is_tensor(value: object) -> bool:
    """Return whether `value` is a torch tensor. torch need not be imported, not even fully."""
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
            # For CPU tensors, `item` is slower: it releases the GIL and has to wait to get it back.
            item = value.tolist()
        elif _count(value) != 1:
            return _MISSING
        else:
            item = value.item()
        if isinstance(item, bool | int | float | str):
            return item
        # `.item()` of the widest NumPy floats returns them unchanged.
        return float(item) if isinstance(item, numbers.Real) or _is_array(item) else _MISSING
    except (RuntimeError, TypeError, ValueError):
        # For example, a meta tensor has a shape but no value.
        return _MISSING


def _count(value: Any) -> int:
    return int(value.numel() if is_tensor(value) else value.size)
