"""Batches as trees of tensors and of lists of samples: their size, cutting and joining them.

A list or tuple that holds no tensor, array or container is a list of samples (what collating
strings gives) and is cut like a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accelerate_core.distributed.collectives import gather_object
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.distributed.tree import (
    flatten,
    honor_type,
    is_namedtuple,
    is_record,
    rebuild,
    rebuild_record,
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


def children_of(tree: Any) -> dict[Any, Any] | None:
    """Return a container's children by key, field or index; None for everything else."""
    kind = type(tree)
    if kind is dict:
        return tree  # type: ignore[no-any-return]
    if isinstance(tree, (list, tuple)):
        return dict(enumerate(tree))
    if isinstance(tree, Mapping):
        return {key: tree[key] for key in tree}
    return record_items(tree) if is_record(tree) else None


def _with_children(tree: Any, children: dict[Any, Any]) -> Any:
    if isinstance(tree, (list, tuple)):
        return honor_type(tree, children.values())
    if isinstance(tree, Mapping):
        return rebuild(tree, [children[key] for key in tree])
    return rebuild_record(tree, children)


def batch_size_of(batch: Any) -> int | None:
    """Return the number of samples of a batch, None if nothing in it tells."""
    if _is_array(batch):
        return int(batch.shape[0]) if len(batch.shape) else None
    if _is_sample_list(batch):
        return len(batch)
    sizes = (batch_size_of(child) for child in (children_of(batch) or {}).values())
    return next((size for size in sizes if size is not None), None)


def slice_batch(batch: Any, part: slice, size: int | None = None) -> Any:
    """Return the samples `part` of a batch; what has no dimension of samples is kept whole."""
    size = batch_size_of(batch) if size is None else size
    if _is_array(batch):
        return batch[part] if len(batch.shape) and batch.shape[0] == size else batch
    if _is_sample_list(batch):
        return batch[part] if len(batch) == size else batch
    children = children_of(batch)
    if children is None:
        return batch
    cut = {key: slice_batch(child, part, size) for key, child in children.items()}
    return _with_children(batch, cut)


def concat_batches(batches: Sequence[Any]) -> Any:
    """Join batches of equal structure along the samples.

    Raises:
        TypeError, RuntimeError or ValueError: the batches do not fit together.
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
    children = [children_of(batch) or {} for batch in batches]
    if children_of(first) is not None:
        if isinstance(first, (list, tuple)) and len({len(each) for each in children}) > 1:
            raise ValueError("The batches have different numbers of fields.")
        joined = {key: concat_batches([each[key] for each in children]) for key in children[0]}
        return _with_children(first, joined)
    if all(batch is first or batch == first for batch in batches):
        return first
    raise TypeError(f"Batches of type {type(first).__name__} cannot be joined.")


def gather_samples(objects: Any, real: int, whole: int | None, comm: Communicator) -> Any:
    """Join the ranks' objects in one list, as `gather_object` does, and drop what is not real.

    Args:
        objects: a list of samples, or fields (a tuple or mapping of lists) of as many samples.
        real: number of real samples of all ranks together, in rank order; 0 if all are.
        whole: number of samples of a global batch, None if unknown; what is longer was gathered
            from more than one and stays.
    """
    fields = isinstance(objects, Mapping) or (
        isinstance(objects, tuple) and bool(objects) and not _is_sample_list(objects)
    )
    if not real or not fields:
        gathered = gather_object(objects, comm)
        fits = whole is None or len(gathered) <= whole
        return gathered[:real] if real and fits else gathered
    ranks = comm.gather_object(objects)
    there = sum(batch_size_of(each) or 0 for each in ranks)
    if whole is not None and there > whole:
        real = there
    cut = []
    for each in ranks:
        size = batch_size_of(each) or 0
        cut.append(slice_batch(each, slice(0, min(real, size)), size))
        real -= min(real, size)
    return cut if isinstance(objects, Mapping) else [field for each in cut for field in each]


def needs_move(batch: Any, device: torch.device) -> bool:
    """Say whether something in the batch is, or may be, not yet on a device."""
    for leaf in flatten(batch):
        where = getattr(leaf, "device", None)
        if isinstance(where, torch.device):
            if where != device:
                return True
        elif callable(getattr(leaf, "to", None)):
            return True
    return False
