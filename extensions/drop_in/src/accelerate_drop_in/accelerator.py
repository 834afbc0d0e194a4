"""The Accelerator of scripts that were written for the original."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate_core import accelerator
from accelerate_core.data.feeding import look_ahead
from accelerate_core.data.loader import CoreLoader
from accelerate_core.data.sources import IndexedSource


class _ReadAhead(IndexedSource):
    """Reads a batch before the one before it is trained on, as feeding an accelerator does anyway.

    Datasets that draw from the global generator draw then as with the original.
    """

    def _items(self, iterator: Iterator[Any], index: Any) -> Iterator[Any]:
        return (item for item, _, _ in look_ahead(super()._items(iterator, index)))


class Accelerator(accelerator.Accelerator):
    """accelerate-core's, with what the original's scripts count on.

    They skip by themselves what was seen of an epoch, so `load_state` leaves the loaders at its
    beginning, unless `restore_positions` or `use_stateful_dataloader` asks for more.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.dataloader_config
        if config.restore_positions is None:
            config.restore_positions = config.use_stateful_dataloader

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        made = super().prepare(*args, **kwargs)
        for one in made if isinstance(made, tuple) else (made,):
            self._read_ahead(one)
        return made

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        return self._read_ahead(super().prepare_data_loader(*args, **kwargs))

    def _read_ahead(self, made: Any) -> Any:
        if isinstance(made, CoreLoader) and not self.dataloader_config.restore_positions:
            source, device = made._source, made.options.device
            if type(source) is IndexedSource and (device is None or device.type == "cpu"):
                made._source = _ReadAhead(source.base, source.stream, source.per_step)
        return made


Accelerator.__init__.__wrapped__ = accelerator.Accelerator.__init__  # type: ignore[attr-defined]
