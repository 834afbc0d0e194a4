"""Skipping the start of an epoch, and filling up or not for a while."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import IterableDataset

from accelerate_core.data.loader import PreparedLoader
from accelerate_core.data.options import LoaderOptions
from accelerate_core.data.prepare import prepare_loader
from accelerate_core.errors import ConfigurationError


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a loader without the first `num_batches` batches (per rank) of every iteration.

    Map-style data that is skipped is not loaded. The result of a prepared loader shares its epoch
    and position: `num_batches` counts from the start of the epoch, also after a position was
    loaded, and the next epoch of the original is the one after.

        for batch in skip_first_batches(loader, 100): ...
    """
    if num_batches < 0:
        raise ConfigurationError(f"num_batches={num_batches}: it must be 0 or more.")
    return prepare_loader(dataloader, LoaderOptions()).skipping(num_batches)


@contextmanager
def override_even_batches(loaders: Iterable[Any], value: bool | None) -> Iterator[None]:
    """Let prepared loaders fill up their last step or not, for the iterations begun inside.

    None changes nothing. A stream that is read by workers which are running keeps its setting.
    """
    changed: list[tuple[PreparedLoader, bool]] = []
    try:
        for loader in loaders:
            if value is None or not isinstance(loader, PreparedLoader):
                continue
            streams = isinstance(getattr(loader, "dataset", None), IterableDataset)
            if streams and getattr(loader, "persistent_workers", False):
                warnings.warn(
                    "even_batches cannot be overridden for an iterable dataset with persistent "
                    "workers once they run.",
                    stacklevel=3,
                )
            changed.append((loader, loader.even_batches))
            loader.even_batches = bool(value)
        yield
    finally:
        for loader, before in changed:
            loader.even_batches = before
