"""Check what a checkpoint's files contain before anything is restored.

Files are read without running code, but their author chose their content.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from accelerate_checkpoint.manifest import MARK
from accelerate_checkpoint.rng_state import check_rng_state
from accelerate_core.plugin import CheckpointError, is_count


class Fields:
    """The values of one mapping in a file. Each getter checks a value.

    Args:
        path: the file, for errors.
        key: the key of the mapping in the file, or "".

    Raises:
        CheckpointError: a value is missing or has another type. It names file and key.
    """

    def __init__(self, path: Path, value: object, key: str = "") -> None:
        self._path = path
        self._key = key
        if not isinstance(value, dict):
            raise self.error("", "a dict", value)
        self.values: dict[Any, Any] = value

    def error(self, name: object, meaning: str, value: object) -> CheckpointError:
        """Return the error for a value that is not what it must be."""
        key = ".".join(str(part) for part in (self._key, name) if part != "")
        subject = f"{key!r} must be" if key else "it must contain"
        return CheckpointError(
            f"{self._path} is damaged: {subject} {meaning}, not {_shown(value)}."
        )

    def check(self, name: object, meaning: str, is_valid: Callable[[Any], bool]) -> Any:
        """Return a value after a test."""
        if name not in self.values:
            raise self.error(name, meaning, "missing")
        value = self.values[name]
        if not is_valid(value):
            raise self.error(name, meaning, value)
        return value

    def fields(self, name: object) -> Fields:
        """Return the values of a mapping inside this one."""
        value = self.check(name, "a dict", lambda value: isinstance(value, dict))
        return Fields(self._path, value, f"{self._key}.{name}" if self._key else str(name))

    def list(self, name: object, meaning: str, is_valid: Callable[[Any], bool]) -> list[Any]:
        """Return a list or tuple after a test of its items."""
        values = self.check(name, f"a list of {meaning}", lambda v: isinstance(v, list | tuple))
        for index, value in enumerate(values):
            if not is_valid(value):
                raise self.error(f"{name}.{index}", meaning, value)
        return list(values)


def _shown(value: object) -> str:
    plain = value is None or isinstance(value, bool | int | float | str)
    return repr(value)[:80] if plain else type(value).__name__


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_amount(value: object) -> bool:
    return _is_number(value) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def check_rank_state(path: Path, state: object) -> None:
    """Check what `TrainingState.rank_state` returned. Accelerate's files only have a part of it.

    Raises:
        CheckpointError: names the file and the key.
    """
    fields = Fields(path, state)
    if "step" in fields.values:
        fields.check("step", "a count", is_count)
    try:
        check_rng_state(fields.values)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if MARK not in fields.values:
        return
    own = fields.fields(MARK)
    cycle = own.fields("cycle")
    cycle.check("step", "a count", is_count)
    cycle.check("sync_gradients", "a boolean", _is_flag)
    cycle.list("steps_taken", "counts", is_count)
    items = cycle.fields("items")
    for name in ("open", "applied"):
        items.check(name, "a boolean", _is_flag)
    items.check("local", "a number", _is_amount)
    for name in ("divisor", "next_divisor"):
        items.check(name, "a number or None", lambda value: value is None or _is_amount(value))
    for index, position in enumerate(own.list("loaders", "positions", _is_mapping_or_none)):
        if position is not None:
            _check_position(Fields(path, position, f"{MARK}.loaders.{index}"))
    for name in ("trackers", "generators"):
        if own.values.get(name) is not None:
            own.fields(name)


def _is_mapping_or_none(value: object) -> bool:
    return value is None or isinstance(value, dict)


def _check_position(position: Fields) -> None:
    """Check the position of one of our loaders. Loaders of other libraries have their own format."""
    if not position.values.keys() >= {"version", "epoch", "global_batches"}:
        return
    position.check("epoch", "a count", is_count)
    position.check("global_batches", "a count", is_count)
    for name in ("batch_size", "samples_seen", "dataset_size"):
        if position.values.get(name) is not None:
            position.check(name, "a count", is_count)
    if position.values.get("batch_size") is not None:
        position.check("samples_seen", "a count", is_count)
    for name in ("torch_rng", "generator"):
        if position.values.get(name) is not None:
            position.check(name, "a state of a generator", _is_generator_state)
    if position.values.get("torch_rng") is not None:
        position.check("torch_rng", "a state of torch's generator", _is_state_on_cpu)
    if position.values.get("draws") is not None:
        position.check("draws", "text", lambda value: isinstance(value, str))
    if "seed" in position.values:
        position.check("seed", "an integer", lambda value: type(value) is int)


def _is_generator_state(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.ndim == 1


def _is_state_on_cpu(value: torch.Tensor) -> bool:
    try:
        torch.Generator().set_state(value)
    except RuntimeError:
        return False
    return True


def check_optimizer_state(path: Path, held: object, optimizer: Any) -> None:
    """Check the state of an optimizer that torch's own code loads. Others have their own format.

    Raises:
        CheckpointError: names the file and the key.
    """
    kind = type(optimizer)
    is_plain = (
        getattr(kind, "load_state_dict", None) is torch.optim.Optimizer.load_state_dict
        and getattr(kind, "state_dict", None) is torch.optim.Optimizer.state_dict
    )
    if not is_plain:
        return
    fields = Fields(path, held)
    fields.fields("state")
    fields.list("param_groups", "dicts", lambda value: isinstance(value, dict))
    numbers: set[int] = set()
    for index, group in enumerate(fields.values["param_groups"]):
        found = Fields(path, group, f"param_groups.{index}")
        numbers |= set(found.list("params", "counts", is_count))
        if "lr" in found.values:
            found.check("lr", "a number", _is_amount)
    state = fields.fields("state")
    for number in state.values:
        if number in numbers:
            state.fields(number)


def count_parameters(path: Path, held: object) -> list[int]:
    """Return the number of parameters in each group of an optimizer's state."""
    groups = Fields(path, held).list("param_groups", "dicts", lambda value: isinstance(value, dict))
    found = [Fields(path, group, f"param_groups.{i}") for i, group in enumerate(groups)]
    return [
        len(one.list("params", "values", lambda _: True)) if "params" in one.values else 0
        for one in found
    ]


def check_scaler_state(path: Path, held: object) -> None:
    """Check the state of torch's gradient scaler. It is empty if the scaler was off.

    Raises:
        CheckpointError: names the file and the key.
    """
    fields = Fields(path, held)
    for name in fields.values:
        fields.check(name, "a number", _is_amount)


def check_scheduler_state(path: Path, held: object, scheduler: Any) -> None:
    """Check the state of one of torch's schedulers. Others have their own format.

    Raises:
        CheckpointError: names the file and the key.
    """
    inner = getattr(scheduler, "scheduler", scheduler)
    if not isinstance(inner, LRScheduler) or not type(inner).__module__.startswith("torch."):
        return
    fields = Fields(path, held)
    for name, present in inner.state_dict().items():
        if name not in fields.values or present is None:
            continue
        if _is_number(present):
            fields.check(name, "a number", _is_amount)
        elif isinstance(present, list) and all(map(_is_amount, present)):
            fields.list(name, "numbers", _is_amount)


def check_gradients(path: Path, held: object, models: int) -> None:
    """Check a file of gradients: model number -> name -> tensor.

    Raises:
        CheckpointError: names the file and the key.
    """
    fields = Fields(path, held)
    for number in fields.values:
        if not is_count(number, models - 1):
            raise fields.error(number, f"the number of one of {models} models", number)
        named = fields.fields(number)
        for name in named.values:
            named.check(name, "a tensor", lambda value: isinstance(value, torch.Tensor))
