"""Accelerate's utilities for nested structures that the core itself doesn't need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from accelerate_core.distributed.tree import columns, rebuild
from accelerate_core.plugin import TensorInformation, children, flatten, map_leaves, map_tensors


def is_torch_tensor(tensor: Any) -> bool:
    """Return whether an object is a `torch.Tensor`."""
    return isinstance(tensor, torch.Tensor)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply `func(leaf, *args, **kwargs)` to every leaf that passes `test_type`.

    Other leaves are returned unchanged.

    Raises:
        TypeError: `error_on_other_type` is true and a leaf doesn't pass `test_type`.

    Example:
        squares = recursively_apply(torch.square, {"a": torch.ones(2), "name": "x"})
    """

    def visit(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(
                f"{_name(func)} does not accept a {type(leaf).__name__}. Pass nested lists, tuples, "
                f"mappings and dataclasses of objects for which {_name(test_type)} is true."
            )
        return leaf

    return map_leaves(visit, data)


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", repr(func))


def is_tensor_information(tensor_info: Any) -> bool:
    """Return whether an object is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def initialize_tensors(data_structure: Any, device: torch.device | str | int | None = None) -> Any:
    """Return the structure with an uninitialised tensor for every `TensorInformation`.

    Args:
        data_structure: the nested structure.
        device: the device of the tensors.
    """
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype, device=device),
        data_structure,
        test_type=is_tensor_information,
    )


def find_batch_size(data: Any) -> int:
    """Return the size of dimension 0 of the first tensor that has dimensions.

    Raises:
        TypeError: no leaf is a tensor.
        ValueError: the structure is empty, or has only 0-d tensors.
    """
    leaves = flatten(data)
    if not leaves:
        raise ValueError(f"An empty {type(data).__name__} has no batch size.")
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise TypeError(f"Only tensors have a batch size, not a {type(leaves[0]).__name__}.")
    for tensor in tensors:
        if tensor.ndim > 0:
            return int(tensor.shape[0])
    raise ValueError("A 0-d tensor has no batch size.")


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return `find_batch_size(data)`, or None if it raises an error."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def listify(data: Any) -> Any:
    """Return the structure with tensors as nested lists of Python numbers; a 0-d tensor is a number."""
    return map_tensors(lambda leaf: leaf.detach().tolist(), data)


def slice_tensors(
    data: Any,
    tensor_slice: Any,
    process_index: int | None = None,
    num_processes: int | None = None,
) -> Any:
    """Index every tensor with `tensor_slice`. 0-d tensors and other leaves are returned unchanged.

    `process_index` and `num_processes` are ignored. They are part of the signature of slicing functions
    for dispatched batches.
    """
    return map_tensors(lambda leaf: leaf[tensor_slice] if leaf.ndim else leaf, data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate equal structures, leaf by leaf, along `dim`. 0-d tensors are stacked.

    Raises:
        TypeError: a leaf is not a tensor.
        ValueError, KeyError: the structures differ.

    Example:
        joined = concatenate([{"x": torch.zeros(2, 3)}, {"x": torch.ones(4, 3)}])
        assert joined["x"].shape == (6, 3)
    """
    first = data[0]
    if len(data) == 1 and not isinstance(first, torch.Tensor):
        return first
    if isinstance(first, torch.Tensor):
        return torch.stack(list(data)) if first.ndim == 0 else torch.cat(list(data), dim=dim)
    if children(first) is None:
        raise TypeError(f"Only tensors can be concatenated, not a {type(first).__name__}.")
    return rebuild(first, [concatenate(column, dim) for column in columns(data)])


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Pad every tensor along `dim` so that the batch can be divided evenly among processes.

    The last entry is repeated until the size is the next multiple of `num_processes`. Tensors whose
    size along `dim` is not `batch_size`, and 0-d tensors, are returned unchanged.

    Example:
        assert pad_input_tensors(torch.zeros(3, 4, 4), 3, 4).shape == (4, 4, 4)
    """
    missing = -batch_size % num_processes

    def pad(leaf: torch.Tensor) -> torch.Tensor:
        if missing == 0 or not -leaf.ndim <= dim < leaf.ndim or leaf.shape[dim] != batch_size:
            return leaf
        last = leaf.narrow(dim, batch_size - 1, 1)
        counts = [1] * leaf.ndim
        counts[dim] = missing
        return torch.cat([leaf, last.repeat(counts)], dim=dim)

    return recursively_apply(pad, tensor, error_on_other_type=True)


def get_shape(data: Any) -> Any:
    """Return the structure with every tensor's shape as a list."""
    return recursively_apply(lambda leaf: list(leaf.shape), data)


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Return whether a value is a tensor on an Intel GPU."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "xpu"


_DTYPES = (torch.float, torch.double, torch.half, torch.bfloat16, torch.uint8, torch.int8)
_MORE_DTYPES = (torch.int16, torch.int32, torch.int64, torch.bool)
#: The number for each dtype in messages between processes.
TENSOR_TYPE_TO_INT = {dtype: number for number, dtype in enumerate(_DTYPES + _MORE_DTYPES, start=1)}
TENSOR_INT_TO_DTYPE = {number: dtype for dtype, number in TENSOR_TYPE_TO_INT.items()}
