"""The size of batches, and how to slice and join them. Batches are trees of tensors and sample lists.

A list or tuple without tensors, arrays or containers, such as collated strings, is a list of
samples and is sliced like a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accelerate_core.distributed.collectives import gather_object
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.distributed.tree import (
    children,
    columns,
    flatten,
    is_namedtuple,
    is_record,
    rebuild,
    record_items,
)


def _is_array(data: Any) -> bool:
    if isinstance(data, torch.Tensor):
        return True
    return hasattr(data, "shape") and hasattr(data, "dtype") and hasattr(data, "__getitem__")


def _is_sample_list(data: Any) -> bool:
    if not isinstance(data, (list, tuple)) or is_namedtuple(data):
        return False
    return not any(isinstance(item, (list, tuple, Mapping)) or _has_arrays(item) for item in data)


def _has_arrays(item: Any) -> bool:
    if is_record(item):
        return any(_is_array(value) for value in record_items(item).values())
    return _is_array(item)


def batch_size_of(batch: Any) -> int | None:
    """Return the number of samples in a batch; None if it cannot be determined."""
    if _is_array(batch):
        return int(batch.shape[0]) if len(batch.shape) else None
    if _is_sample_list(batch):
        return len(batch)
    sizes = (batch_size_of(child) for child in children(batch) or ())
    return next((size for size in sizes if size is not None), None)


def slice_batch(batch: Any, part: slice, size: int | None = None) -> Any:
    """Return the samples `part` of a batch; leaves without a sample dimension are returned unchanged."""
    size = batch_size_of(batch) if size is None else size
    if _is_array(batch):
        return batch[part] if len(batch.shape) and batch.shape[0] == size else batch
    if _is_sample_list(batch):
        return batch[part] if len(batch) == size else batch
    inner = children(batch)
    if inner is None:
        return batch
    return rebuild(batch, [slice_batch(child, part, size) for child in inner])


def concat_batches(batches: Sequence[Any]) -> Any:
    """Join batches of equal structure along the samples.

    Raises:
        TypeError, RuntimeError or ValueError: the batches have different structures or shapes.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return first if first.ndim == 0 else torch.cat(list(batches))
    if _is_array(first):
        import numpy

        return numpy.concatenate(list(batches)) if len(first.shape) else first
    if _is_sample_list(first):
        return type(first)(sample for batch in batches for sample in batch)
    if children(first) is not None:
        return rebuild(first, [concat_batches(each) for each in columns(batches)])
    if all(batch is first or batch == first for batch in batches):
        return first
    raise TypeError(f"Batches of type {type(first).__name__} cannot be joined.")


def gather_samples(objects: Any, real: int, whole: int | None, comm: Communicator) -> Any:
    """Join the ranks' objects in one list, as `gather_object` does, and drop padding.

    Args:
        objects: a list of samples, or fields (a tuple or mapping of lists) with one entry per sample.
        real: the number of real samples over all ranks, in rank order; 0 if all are real.
        whole: the number of samples of a global batch; None if unknown. A longer result comes from
            more than one batch and is not cut.
    """
    fields = isinstance(objects, Mapping) or (
        isinstance(objects, tuple) and bool(objects) and not _is_sample_list(objects)
    )
    if not real or not fields:
        gathered = gather_object(objects, comm)
        fits = whole is None or len(gathered) <= whole
        return gathered[:real] if real and fits else gathered
    ranks = comm.gather_object(objects)
    sizes = [batch_size_of(each) or 0 for each in ranks]
    if whole is not None and sum(sizes) > whole:
        real = sum(sizes)
    cut = []
    for each, size in zip(ranks, sizes, strict=True):
        cut.append(slice_batch(each, slice(0, max(real, 0)), size))
        real -= size
    return cut if isinstance(objects, Mapping) else [field for each in cut for field in each]


def needs_move(batch: Any, device: torch.device) -> bool:
    """Return whether any leaf of the batch is, or may be, on another device."""
    for leaf in flatten(batch):
        where = getattr(leaf, "device", None)
        if isinstance(where, torch.device):
            if where != device:
                return True
        elif callable(getattr(leaf, "to", None)):
            return True
    return False
