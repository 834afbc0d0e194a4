"""A prepared loader that a plugin made: checked, and blamed by name for what it raises."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate_core.contract.parts import PreparedLoader, check_members
from accelerate_core.delegation import itself
from accelerate_core.errors import PluginError
from accelerate_core.plugins.discovery import PluginRecord
from accelerate_core.plugins.factory import Attributed, add_plugin_note, attribution
from accelerate_core.training.gradient_state import GradientState


class ExternalLoader(Attributed):
    """Hands everything on to the loader that a plugin made, and names the plugin in what it raises.

    Args:
        loader: what `make_loader` returned.
        record: the plugin's.
        state: of the Accelerator, which has to be told of every batch.

    Raises:
        PluginError: it is no `PreparedLoader`; when iterated: it does not tell the `GradientState`.
    """

    def __init__(self, loader: Any, record: PluginRecord, state: GradientState) -> None:
        what = f"A {type(loader).__name__}, which make_loader of {record.label} returned,"
        check_members(loader, PreparedLoader, what)
        super().__init__(loader, record)
        self.__dict__["_state"] = state

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._part)

    def __len__(self) -> int:
        return len(self._part)

    def __iter__(self) -> Iterator[Any]:
        state: GradientState = self._state
        try:
            batches = iter(self._part)
            for batch in batches:
                if not state.hold(self._part, self):
                    raise PluginError(
                        f"The loader of {self._record.label} hands out batches of its own: its __iter__ "
                        "has to return accelerator.gradient_state.serve(self, start, whole)."
                    )
                yield batch
                yield from batches
        except Exception as error:
            if not state.in_listener:
                add_plugin_note(error, "__iter__", self._record)
            raise

    def skipping(self, num_batches: int) -> ExternalLoader:
        """Return this loader without its first batches."""
        with attribution("skipping", self._record):
            rest = self._part.skipping(num_batches)
        return ExternalLoader(rest, self._record, self._state)

    def __reduce__(self) -> Any:
        return itself, (self._part,)  # as for optimizers: what belongs to this run stays here
