"""The loader factory, which decides which loaders this package creates."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from accelerate_core.plugin import AcceleratorView, ConfigurationError
from accelerate_records.loader import RecordsLoader
from accelerate_records.records import Records
from accelerate_records.settings import RecordsSettings

__all__ = ["RecordsLoaderFactory"]


class RecordsLoaderFactory:
    """Creates loaders for `Records`. The core handles all other datasets.

    The core also handles loaders of `Records` that have their own sampler or collate function.
    """

    name = "records"
    api_version = (1, 0)
    Settings = RecordsSettings

    def __init__(self, settings: RecordsSettings) -> None:
        self.settings = settings

    def make_loader(self, accelerator: AcceleratorView, loader: Any) -> RecordsLoader | None:
        """Return a `RecordsLoader` that replaces a `DataLoader` of `Records`.

        Raises:
            ConfigurationError: the batch size cannot be split, or the backend does not accept it.
        """
        if type(loader) is not DataLoader or not isinstance(loader.dataset, Records):
            return None
        sampler = loader.sampler
        shuffles = type(sampler) is RandomSampler and not sampler.replacement
        if not (shuffles or type(sampler) is SequentialSampler):
            return None
        every = isinstance(sampler, Sized) and len(sampler) == len(loader.dataset)
        batches = type(loader.batch_sampler) is BatchSampler
        if not (every and batches and loader.collate_fn is default_collate):
            return None
        size = int(loader.batch_size or 0)
        if accelerator.split_batches:
            _, count = accelerator.hooks.data_shard()
            if size % count:
                raise ConfigurationError(
                    f"split_batches=True, but batch_size={size} is not divisible by {count} ranks."
                )
            size //= count
        seed = self.settings.seed
        return RecordsLoader(accelerator, loader.dataset, size, shuffles, loader.drop_last, seed)
