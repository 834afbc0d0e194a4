"""Data: which part of it a rank reads, in which order, and where an epoch stands."""

from accelerate_core.data.batch import gather_samples
from accelerate_core.data.dispatch import DispatchError
from accelerate_core.data.loader import DataLoaderDispatcher, DataLoaderShard, PreparedLoader
from accelerate_core.data.order import SeedableRandomSampler
from accelerate_core.data.prepare import prepare_data_loader
from accelerate_core.data.rng import check_rng_types, synchronize_rng_states
from accelerate_core.data.shard import BatchSamplerShard, IterableDatasetShard
from accelerate_core.data.skip import (
    SkipBatchSampler,
    override_even_batches,
    skip_first_batches,
)

__all__ = [
    "BatchSamplerShard",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DispatchError",
    "IterableDatasetShard",
    "PreparedLoader",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "check_rng_types",
    "gather_samples",
    "override_even_batches",
    "prepare_data_loader",
    "skip_first_batches",
    "synchronize_rng_states",
]
