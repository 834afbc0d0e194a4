"""Prepared loaders from plugins, with the plugin named in exceptions."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, cast

from accelerate_core.contract.parts import PreparedLoader, check_members
from accelerate_core.data.loader import BaseAttribute
from accelerate_core.errors import PluginError
from accelerate_core.pickling import unwrapped
from accelerate_core.plugins.discovery import PluginRecord
from accelerate_core.plugins.factory import add_plugin_note, attribution
from accelerate_core.training.gradient_state import GradientState


class _AttributedAttribute(BaseAttribute):
    """An attribute of the plugin's loader, with the plugin named in exceptions."""

    def __get__(self, loader: Any, owner: type) -> Any:
        if loader is None:
            return self
        with attribution(self.name, loader._record):
            return super().__get__(loader, owner)

    def __set__(self, loader: Any, value: Any) -> None:
        with attribution(self.name, loader._record):
            super().__set__(loader, value)


def _of_base() -> Any:
    return _AttributedAttribute()


class ExternalLoader:
    """A `PreparedLoader` whose members come from a plugin's loader.

    Args:
        base: the loader that `make_loader` returned. Its other members are read through this attribute.
        record: the record of the plugin, whose name is added to errors of the loader.
        state: the gradient state of the Accelerator. The loader must report every batch to it.

    Raises:
        PluginError: `base` is not a `PreparedLoader`, or it yields batches without reporting them.
    """

    #: Whether the last global step is padded.
    even_batches: bool = _of_base()
    #: Whether batches are moved to the device.
    put_on_device: bool = _of_base()
    #: The epoch that the next iteration belongs to.
    iteration: int = _of_base()
    #: Real samples in the last global batch if it is not full, 0 if it is, -1 if unknown.
    remainder: int = _of_base()
    #: The dataset of the plugin's loader; `AttributeError` if it has none.
    dataset: Any = _of_base()

    def __init__(self, base: PreparedLoader, record: PluginRecord, state: GradientState) -> None:
        what = f"A {type(base).__name__}, which make_loader of {record.label} returned,"
        check_members(base, PreparedLoader, what)
        self.base = base
        self._record = record
        self._state = state

    @property
    def dataset_size(self) -> int | None:
        """Number of samples in the dataset; None if unknown."""
        return getattr(self.base, "dataset_size", None)

    def __len__(self) -> int:
        return len(cast(Sized, self.base))

    def __iter__(self) -> Iterator[Any]:
        try:
            batches = iter(self.base)
            for batch in batches:
                if not self._state.hold(self.base, self):
                    raise PluginError(
                        f"The loader of {self._record.label} yields batches without reporting them. Its "
                        "__iter__ must return accelerator.gradient_state.serve(self, start, whole)."
                    )
                yield batch
                yield from batches
        except Exception as error:
            if not self._state.in_listener:
                add_plugin_note(error, "__iter__", self._record)
            raise

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        with attribution("set_epoch", self._record):
            self.base.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        with attribution("state_dict", self._record):
            return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, from the next iteration on."""
        with attribution("load_state_dict", self._record):
            self.base.load_state_dict(state_dict)

    def skipping(self, num_batches: int) -> ExternalLoader:
        """Return this loader without its first batches."""
        with attribution("skipping", self._record):
            rest = self.base.skipping(num_batches)
        return ExternalLoader(rest, self._record, self._state)

    def __reduce__(self) -> Any:
        return unwrapped, (self.base,)  # state of this run is not pickled, as for optimizers
