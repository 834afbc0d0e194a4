"""The collectives as functions that use the communicator of the latest Accelerator.

Without an Accelerator, they use the communicator of the process, which the first call creates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from accelerate_big_model.tensors import find_device
from accelerate_core.data import rng
from accelerate_core.distributed import collectives
from accelerate_core.plugin import (
    Communicator,
    ConfigurationError,
    DistributedOperationException,
    get_data_structure,
    warn,
)
from accelerate_core.state import current_communicator
from accelerate_drop_in.trees import TENSOR_TYPE_TO_INT, get_shape, initialize_tensors

_F = TypeVar("_F", bound=Callable[..., Any])


def gather(tensor: Any) -> Any:
    """Concatenate the tensors of all processes along dimension 0; see `Accelerator.gather`."""
    return collectives.gather(tensor, current_communicator())


def gather_object(object: Any) -> Any:
    """Concatenate the lists of picklable objects of all processes, in rank order."""
    return collectives.gather_object(object, current_communicator())


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Reduce the tensors of all processes element by element.

    Args:
        reduction: "mean", "sum", "max", "min" or "none".
        scale: a factor for the result.
    """
    return collectives.reduce(tensor, reduction, scale, comm=current_communicator())


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Send the tensors of one process to all processes.

    Args:
        from_process: the rank that sends.
    """
    return collectives.broadcast(tensor, from_process, comm=current_communicator())


def broadcast_object_list(
    object_list: list[Any], from_process: int = 0, *, comm: Communicator | None = None
) -> list[Any]:
    """Replace the picklable objects in a list, in place, by those of one process; return the list.

    Args:
        from_process: the rank that sends.
        comm: the communicator of the ranks that take part; by default all.

    Raises:
        ConfigurationError: `from_process` is not a rank.
        DistributedOperationException: the list of this process has another length.
    """
    comm = comm or current_communicator()
    if not 0 <= from_process < comm.size:
        raise ConfigurationError(
            f"broadcast_object_list: from_process={from_process} must be from 0 to {comm.size - 1}."
        )
    received = comm.broadcast_object(object_list, from_process)
    if len(received) != len(object_list):
        raise DistributedOperationException(
            f"broadcast_object_list: process {from_process} sent {len(received)} objects, but the list "
            f"of process {comm.rank} has {len(object_list)}. All lists must have the same length."
        )
    if comm.rank != from_process:
        object_list[:] = received
    return object_list


def pad_across_processes(
    tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
) -> Any:
    """Pad the tensors of all processes along a dimension to the largest size.

    Args:
        dim: the dimension.
        pad_index: the value for padding.
        pad_first: pad at the beginning.
    """
    if getattr(tensor, "is_nested", False):  # the core only warns if something must be padded
        warn(
            "A nested tensor cannot be padded, so it is returned unchanged.",
            collectives.CannotPadNestedTensorWarning,
        )
        return tensor
    return collectives.pad_across_processes(
        tensor, dim, pad_index, pad_first, comm=current_communicator()
    )


def copy_tensor_to_devices(
    tensor: torch.Tensor | None = None, *, comm: Communicator | None = None
) -> torch.Tensor:
    """Send the tensor of one process to all processes; the others pass None.

    Unlike with `broadcast`, the others need to know neither its shape nor which process has it. `comm` is
    the communicator to use, by default the current one.

    Raises:
        DistributedOperationException: not exactly one process passes a tensor; raised on all.
    """
    comm = comm or current_communicator()
    infos = comm.gather_object(get_data_structure(tensor))
    holders = [rank for rank, info in enumerate(infos) if info is not None]
    if len(holders) != 1:
        given = f"processes {', '.join(map(str, holders))} did" if holders else "none did"
        raise DistributedOperationException(
            f"copy_tensor_to_devices: exactly one process must pass a tensor, but {given}."
        )
    if tensor is None:
        tensor = initialize_tensors(infos[holders[0]], comm.device)
    result: torch.Tensor = collectives.broadcast(tensor, holders[0], comm=comm)
    return result


def wait_for_everyone() -> None:
    """Wait until all processes have called this."""
    current_communicator().barrier()


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """Set a random generator on all processes to the state that it has on rank 0.

    Args:
        rng_type: "torch", "generator" or a device type.
        generator: the generator for the type "generator".
    """
    if rng_type is None:
        rng_type = "torch" if generator is None else "generator"
    synchronize_rng_states([rng_type], generator)


def synchronize_rng_states(
    rng_types: Iterable[Any], generator: torch.Generator | None = None
) -> None:
    """Set random generators on all processes to the states that they have on rank 0.

    Args:
        rng_types: "torch", "generator", or a device type such as "cuda".
        generator: the generator for the type "generator".
    """
    rng.synchronize_rng_states(rng_types, generator, current_communicator())


def gather_tensor_shape(tensor: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """Return the shape of a tensor that one process has, and its dtype as in `TENSOR_INT_TO_DTYPE`."""
    own = None if tensor is None else (list(tensor.shape), TENSOR_TYPE_TO_INT[tensor.dtype])
    infos = [one for one in current_communicator().gather_object(own) if one is not None]
    if len(infos) != 1:
        raise DistributedOperationException(
            f"gather_tensor_shape: exactly one process must pass a tensor, but {len(infos)} did."
        )
    shape, number = infos[0]
    return torch.tensor(shape, dtype=torch.int, device=current_communicator().device), number


def verify_operation(function: _F) -> _F:
    """Decorate a collective so that, in debug mode, shapes and devices are compared before it starts.

    Raises:
        DistributedOperationException: the collective is called and they differ between processes.
    """

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        comm = current_communicator()
        if comm.size > 1 and comm.debug:
            tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
            found = find_device(tensor)
            if found is not None and found.type != comm.device.type:
                raise DistributedOperationException(
                    f"{function.__name__}: a tensor is on {found}, but this process uses "
                    f"{comm.device}. Move it there first."
                )
            shapes = comm.gather_object(get_shape(tensor))
            if any(one != shapes[0] for one in shapes):
                listed = "; ".join(f"process {rank}: {one}" for rank, one in enumerate(shapes))
                raise DistributedOperationException(
                    f"{function.__name__}: shapes differ between processes: {listed}."
                )
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def chained_operation(function: _F) -> _F:
    """Decorate a function that runs collectives, so that their errors name it."""

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            raise DistributedOperationException(
                f"{function.__module__}.{function.__name__} failed: {error}"
            ) from error

    return named  # type: ignore[return-value]
