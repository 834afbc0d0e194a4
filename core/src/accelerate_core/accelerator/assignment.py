"""Check assignments to attributes of an Accelerator after its construction."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from accelerate_core.config.handlers import AutocastKwargs
from accelerate_core.data.rng import check_rng_types
from accelerate_core.errors import AssignmentError
from accelerate_core.plugins import catalog

#: Attributes that can be assigned. The new value applies to later prepares, saves and loads.
_ASSIGNABLE = {"dataloader_config", "device_placement", "project_configuration", "rng_types"}
_ASSIGNABLE |= {"autocast_handler", "step_scheduler_with_optimizer", "upcast_outputs"}
#: Attributes that other parts also hold, so replacing them after construction would have no effect.
_FIXED = {"backend", "provenance", "gradient_state", "hooks", "init_handler", "precision", "scaler"}
_FIXED |= {"device", "dynamo_plugin", "scaler_handler", "scheduler_steps"}


class Assignable:
    """Checks assigned values, and refuses assignments that would have no effect."""

    if not TYPE_CHECKING:  # type checkers would accept every misspelt name

        def __setattr__(self, name: str, value: Any) -> None:
            # `_tracking` is the last attribute that construction sets.
            if "_tracking" in self.__dict__ and not name.startswith("_"):
                if name in _ASSIGNABLE:
                    value = self._checked(name, value)
                elif name in _FIXED or not hasattr(type(self), name):
                    self._refuse_to_replace(name, value)
            super().__setattr__(name, value)

    def _checked(self, name: str, value: Any) -> Any:
        """Return the value to set.

        Raises:
            AssignmentError: the value has another type than the current one.
            ConfigurationError: `rng_types` names an unknown generator.
        """
        kind = AutocastKwargs if name == "autocast_handler" else type(getattr(self, name))
        if name == "rng_types":
            value = check_rng_types(value)
        elif not isinstance(value, kind) and not (value is None and kind is AutocastKwargs):
            raise AssignmentError(f"accelerator.{name} takes a {kind.__name__}, not {value!r}.")
        return value

    def _refuse_to_replace(self, name: str, value: Any) -> None:
        """Refuse an attribute that is only read during construction. Unknown names are allowed.

        Raises:
            AssignmentError: the Accelerator, its constructor or a plugin has an attribute of this name.
        """
        arguments = inspect.signature(type(self)).parameters
        provided = self.__dict__["_shared_hooks"].provided_attributes().keys()
        if name not in _FIXED | provided | catalog.ABSENT_ATTRIBUTES.keys() | arguments.keys():
            return
        now = getattr(self, name, None)
        if now is value or (isinstance(value, bool | int | str) and now == value):
            return
        if name in arguments:
            way_out = f"pass it to Accelerator({name}=...)"
        elif name.endswith("_handler"):
            way_out = "pass it in kwargs_handlers when you create the Accelerator"
        else:
            way_out = "it follows from the arguments of Accelerator"
        raise AssignmentError(f"accelerator.{name} cannot be replaced: {way_out}.")
