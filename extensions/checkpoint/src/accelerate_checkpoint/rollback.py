"""Keep objects as they are before a load, and restore them if the load fails."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterable
from typing import Any

import torch

from accelerate_checkpoint import rng_state


class Rollback:
    """The state of small objects before a load: attributes, containers, tensors and generators.

    Weights and the state of optimizers are not copied, because that would double them in memory.

    Args:
        apart: objects that are not entered, such as models and optimizers.
    """

    def __init__(self, apart: Iterable[object] = ()) -> None:
        self._apart = {id(one) for one in apart}
        self._seen: dict[int, object] = {}  # keeps the objects alive, so that ids stay unique
        self._attributes: list[tuple[Any, dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._states: list[tuple[Any, Any]] = []
        self._generators: dict[str, Any] = {}

    def keep_generators(self, devices: Collection[torch.device]) -> None:
        """Keep the global random generators."""
        self._generators = rng_state.capture_rng_state(sorted(devices, key=str))

    def keep_attributes(self, obj: Any) -> None:
        """Keep which objects the attributes refer to, as for an optimizer that replaces its state."""
        if hasattr(obj, "__dict__"):
            self._attributes.append((obj, dict(vars(obj))))

    def keep_position(self, loader: Any) -> None:
        """Keep the position of a loader, without entering its data set."""
        self._states.append((loader, loader.state_dict()))
        for one in (loader, getattr(loader, "_position", None)):
            self.keep_attributes(one)

    def keep(self, obj: Any) -> None:
        """Keep an object with `load_state_dict`, and such objects inside it."""
        if not hasattr(obj, "__dict__"):  # its attributes cannot be listed
            self._states.append((obj, copy.deepcopy(obj.state_dict())))
            return
        self._enter(obj)

    def _enter(self, value: Any) -> None:
        if id(value) in self._seen or id(value) in self._apart or hasattr(value, "param_groups"):
            return
        if isinstance(value, torch.Tensor):
            self._seen[id(value)] = value
            if not value.is_meta:
                # In host memory, because a device may have no room for a second copy.
                self._tensors.append((value, value.detach().to("cpu", copy=True)))
        elif isinstance(value, (dict, list, set)):
            self._seen[id(value)] = value
            self._containers.append((value, copy.copy(value)))
            for one in list(value.values() if isinstance(value, dict) else value):
                self._enter(one)
        elif isinstance(value, tuple):
            for one in value:
                self._enter(one)
        elif hasattr(value, "__dict__") and callable(getattr(value, "load_state_dict", None)):
            self._seen[id(value)] = value
            self.keep_attributes(value)
            for one in list(vars(value).values()):
                self._enter(one)

    def restore(self) -> None:
        """Restore everything that was kept. What cannot be restored is left."""
        for obj, state in self._states:
            with contextlib.suppress(Exception):
                obj.load_state_dict(state)
        for obj, attributes in self._attributes:
            vars(obj).clear()
            vars(obj).update(attributes)
        for container, contents in self._containers:
            container.clear()
            if isinstance(container, list):
                container.extend(contents)
            else:
                container.update(contents)
        with torch.no_grad():
            for tensor, before in self._tensors:
                tensor.detach().copy_(before)
        if self._generators:
            rng_state.restore_rng_state(self._generators)
