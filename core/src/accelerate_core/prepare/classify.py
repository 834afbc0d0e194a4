"""Determine what kind of object was passed to `prepare`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast, get_args

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accelerate_core.contract.members import ObjectKind
from accelerate_core.errors import PrepareError, warn

OBJECT_KINDS: tuple[ObjectKind, ...] = get_args(ObjectKind)
_CLASSES: tuple[tuple[type, ObjectKind], ...] = (
    (torch.nn.Module, "model"),
    (torch.optim.Optimizer, "optimizer"),
    (LRScheduler, "scheduler"),
    (DataLoader, "loader"),
)


def classify(obj: Any, ask_plugins: Callable[[Any], Iterable[str]] | None = None) -> ObjectKind:
    """Return the kind of an object. Plugins are asked first, so that they can classify their classes.

    Raises:
        PrepareError: a plugin returned an unknown kind, or two plugins disagree.
    """
    said = set(ask_plugins(obj)) if ask_plugins is not None else set()
    if len(said) > 1 or not said <= set(OBJECT_KINDS):
        raise PrepareError(
            f"Plugins classify {type(obj).__name__} as {sorted(said)}; it must be one of {OBJECT_KINDS}."
        )
    if said:
        return cast(ObjectKind, said.pop())
    for cls, kind in _CLASSES:
        if isinstance(obj, cls):
            return kind
    return _by_shape(obj)


def check_preparable(obj: Any, position: int) -> None:
    """Warn about objects that cannot be prepared and were probably passed by mistake.

    These are numbers, strings, classes, and a list, tuple or dict of objects to prepare.

    Args:
        obj: the object.
        position: the position of the argument, from 1.
    """
    if isinstance(obj, type | str | bytes | int | float | complex):
        what = f"the class {obj.__name__}" if isinstance(obj, type) else f"{obj!r}"
        warn(
            f"prepare() takes models, optimizers, schedulers and data loaders; argument {position} is "
            f"{what}, which is returned unchanged."
        )
        return
    inner = obj.values() if isinstance(obj, dict) else obj
    if isinstance(obj, dict | list | tuple) and any(classify(one) != "other" for one in inner):
        warn(
            f"Argument {position} of prepare() is a {type(obj).__name__}, and the objects inside it are "
            "not prepared. Pass each object as a separate argument, as in prepare(*objects)."
        )


def _by_shape(obj: Any) -> ObjectKind:
    """Recognise other classes by their methods."""
    if isinstance(obj, type | torch.Tensor | str | bytes | dict | list | tuple):
        return "other"

    def has(*names: str) -> bool:
        return all(hasattr(obj, name) for name in names)

    if has("param_groups", "step", "zero_grad"):
        return "optimizer"
    if has("step", "get_last_lr", "state_dict") or has("step", "optimizer", "state_dict"):
        return "scheduler"
    if has("__iter__", "dataset"):
        return "loader"
    return "other"
