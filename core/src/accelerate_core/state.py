"""`PartialState`, `AcceleratorState`, and the methods for ranks that they share with the Accelerator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import torch
import torch.distributed as dist

from accelerate_core.config.enums import DistributedType
from accelerate_core.distributed import process as runtimes
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.distributed.message_history import MessageHistory
from accelerate_core.distributed.torch_collectives import TorchCollectives, bind_collectives
from accelerate_core.errors import (
    AssignmentError,
    RuntimeConflictError,
    UnknownNameError,
    did_you_mean,
)
from accelerate_core.plugins import catalog
from accelerate_core.plugins.devices import device_plugin

if TYPE_CHECKING:
    from accelerate_core.plugins.contributed import PluginAttributes
else:  # what plugins add follows from what is installed
    PluginAttributes = object

_ABSENT = object()

F = TypeVar("F", bound=Callable[..., Any])


def current_communicator() -> Communicator:
    """Return the communicator of the latest Accelerator, or of the process if there is none."""
    user = runtimes.current_user()
    if user is not None:
        return cast(Communicator, user.communicator)
    runtime = runtimes.current_runtime()
    if runtime.history is None:
        runtime.history = MessageHistory()
    return Communicator(
        rank=runtime.process_index,
        size=runtime.num_processes,
        device=runtime.device,
        hooks=bind_collectives(TorchCollectives()),
        debug=runtime.debug,
        history=runtime.history,
    )


def split_between(inputs: Any, index: int, count: int, apply_padding: bool = False) -> Any:
    """Return part `index` of `count` of a list, tuple, tensor, dict of these, or dataset.

    If the length isn't divisible, the first parts have one element more. With `apply_padding`, the last
    element is repeated until all parts have the same length.

    Raises:
        ValueError: the values of a dict differ in length.
    """
    if count == 1:
        return inputs
    if isinstance(inputs, dict):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"To be split, the values of a dict must be equally long: {lengths}.")
        parts = {k: split_between(v, index, count, apply_padding) for k, v in inputs.items()}
        return type(inputs)(parts)
    total = len(inputs)
    size, extra = divmod(total, count)
    start = index * size + min(index, extra)
    stop = start + size + (index < extra)
    missing = apply_padding and 0 < extra <= index  # by one element
    if hasattr(inputs, "select") and not isinstance(inputs, torch.Tensor):
        rows = [*range(start, stop), *([total - 1] * missing)]
        return inputs.select(rows)  # a datasets.Dataset, which remains a dataset
    part = inputs[start:stop]
    if not missing:
        return part
    return torch.cat([part, inputs[-1:]]) if isinstance(part, torch.Tensor) else part + inputs[-1:]


class Ranks:
    """Properties for the ranks of this process."""

    #: The ranks, device and group of this process.
    _runtime: runtimes.Runtime
    #: The device of this process.
    device: torch.device

    @property
    def num_processes(self) -> int:
        """The number of processes (the world size)."""
        return self._runtime.num_processes

    @property
    def process_index(self) -> int:
        """The rank of this process."""
        return self._runtime.process_index

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its machine."""
        return self._runtime.local_process_index

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process on its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the process with the highest rank."""
        return self.process_index == self.num_processes - 1


class ProcessVerbs(Ranks):
    """Properties and methods for ranks, shared by Accelerator and PartialState."""

    @property
    def communicator(self) -> Communicator:
        """Collectives among all ranks, on flat tensors and objects."""
        raise NotImplementedError

    def wait_for_everyone(self) -> None:
        """Wait until every process has called this."""
        self.communicator.barrier()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process of each machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    @contextmanager
    def _in_turn(self, first: bool) -> Iterator[None]:
        if not first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if first:
                self.wait_for_everyone()

    def main_process_first(self) -> Any:
        """Return a context that the main process completes before the others enter it.

        Example:
            with accelerator.main_process_first():  # one process downloads, the others use its files
                data = torch.ones(8)
        """
        return self._in_turn(self.is_main_process)

    def local_main_process_first(self) -> Any:
        """Return a context that the first process of each machine completes before the others enter it."""
        return self._in_turn(self.is_local_main_process)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this process's part of a list, tuple, tensor, or dict of these.

        Args:
            inputs: the data to split along its first dimension.
            apply_padding: repeat the last element so that all parts have the same length.

        Example:
            with accelerator.split_between_processes(["one", "two", "three"]) as prompts:
                lengths = [len(prompt) for prompt in prompts]
        """
        yield split_between(inputs, self.process_index, self.num_processes, apply_padding)

    @overload
    def on_main_process(self, function: F) -> F: ...
    @overload
    def on_main_process(self, function: None = None) -> Callable[[F], F]: ...
    def on_main_process(self, function: Any = None) -> Any:
        """Decorate a function to run on the main process only. On other processes, it returns None.

        Example:
            @accelerator.on_main_process
            def report(loss):
                print(f"loss {loss:.3f}")

            report(0.5)
        """
        return self._only(function, lambda: self.is_main_process)

    @overload
    def on_local_main_process(self, function: F) -> F: ...
    @overload
    def on_local_main_process(self, function: None = None) -> Callable[[F], F]: ...
    def on_local_main_process(self, function: Any = None) -> Any:
        """Decorate a function to run only on the first process of each machine."""
        return self._only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: F) -> F:
        """Decorate a function to run only on the process with the highest rank."""
        return cast(F, self._only(function, lambda: self.is_last_process))

    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Decorate a function to run only on rank `process_index`."""
        return self._only(function, lambda: self.process_index == process_index)

    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Decorate a function to run only on local rank `local_process_index` of each machine."""
        return self._only(function, lambda: self.local_process_index == local_process_index)

    def _only(self, function: Any, here: Callable[[], bool]) -> Any:
        if function is None:
            return lambda given: self._only(given, here)

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            # Checked at each call, because a function may be decorated before the group runs.
            return function(*args, **kwargs) if here() else None

        return guarded


class PartialState(ProcessVerbs):
    """Information about the processes, without an Accelerator. It starts the process group if necessary.

    All instances share the same state.

    Args:
        cpu: run on the CPU even if accelerators are present.
    """

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        timeout = kwargs.get("timeout")
        if isinstance(timeout, int | float):
            timeout = timedelta(seconds=timeout)
        runtimes.acquire(
            None,
            cpu=cpu,
            timeout=timeout,
            comm_backend=kwargs.get("backend"),
            init_method=kwargs.get("init_method"),
        )

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}\n"
            f"Num processes: {self.num_processes}\nProcess index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\nDevice: {self.device}\n"
        )

    if not TYPE_CHECKING:  # type checkers would accept every misspelt name

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "_accelerator":
                super().__setattr__(name, value)
            elif getattr(self, name, _ABSENT) is not value:
                raise AssignmentError(
                    f"{type(self).__name__}.{name} cannot be assigned, because a state only shows how the "
                    "process runs. Pass an argument to Accelerator instead."
                )

    @property
    def _runtime(self) -> runtimes.Runtime:  # type: ignore[override]
        found = runtimes.running()
        if found is None:
            raise RuntimeConflictError(
                "The runtime has ended. Create a new PartialState or Accelerator."
            )
        return found

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device of this process."""
        return self._runtime.device

    @property
    def communicator(self) -> Communicator:
        """Collectives among all ranks, on flat tensors and objects."""
        return current_communicator()

    @property
    def initialized(self) -> bool:
        """Whether the process group has started."""
        return runtimes.running() is not None

    @property
    def debug(self) -> bool:
        """Whether shapes are checked before collectives."""
        return self._runtime.debug

    @property
    def backend(self) -> str | None:
        """Name of torch.distributed's backend, or None on one process."""
        return dist.get_backend() if dist.is_available() and dist.is_initialized() else None

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of setup, as declared by the active backend."""
        user = runtimes.current_user()
        if user is not None:
            return cast(DistributedType, user.distributed_type)
        runtime = self._runtime
        if runtime.num_processes == 1:
            return DistributedType("NO")
        kind = device_plugin(runtime.device.type).label or runtime.device.type.upper()
        return DistributedType(f"MULTI_{kind}")

    @property
    def default_device(self) -> torch.device:
        """The device that a single process would use."""
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    def set_device(self) -> None:
        """Make this process's device the current one. Starting has already done so."""
        runtimes.select(self.device)

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroy a group, or the default group if nothing else uses it."""
        if group is not None:
            dist.destroy_process_group(group)
        else:
            runtimes.release(self)


class AcceleratorState(PartialState, PluginAttributes):
    """The attributes of `accelerator.state`. Active plugins add more."""

    def __init__(self, accelerator: Any = None, **kwargs: Any) -> None:
        self._accelerator: Any = accelerator or runtimes.current_user()
        if self._accelerator is None:
            raise RuntimeConflictError(
                "There is no Accelerator yet. Create one before AcceleratorState()."
            )

    if not TYPE_CHECKING:  # type checkers would accept every misspelt name

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            return self._accelerator._plugin_attribute(name, "AcceleratorState")

    def __repr__(self) -> str:
        return f"{super().__repr__()}Mixed precision type: {self.mixed_precision}\n"

    @property
    def mixed_precision(self) -> str:
        """Name of the active precision."""
        return str(self._accelerator.mixed_precision)

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of setup, as declared by the active backend."""
        return cast(DistributedType, self._accelerator.distributed_type)

    @property
    def dynamo_plugin(self) -> Any:
        """The settings for `torch.compile`."""
        return self._accelerator.dynamo_plugin

    @property
    def device_mesh(self) -> Any:
        """The device mesh, or None."""
        return self._accelerator.torch_device_mesh

    @property
    def communicator(self) -> Communicator:
        """Collectives among all ranks, on flat tensors and objects."""
        return cast(Communicator, self._accelerator.communicator)


def absent_attribute(name: str, owner: str, known: list[str]) -> Any:
    """Return the value of an attribute that no active plugin provides.

    Raises:
        UnknownNameError: the attribute is unknown. The message suggests the nearest name.
    """
    if name in catalog.ABSENT_ATTRIBUTES:
        return catalog.ABSENT_ATTRIBUTES[name]
    if name in catalog.METHODS:
        command = catalog.pip_command(catalog.METHODS[name])
        text = f"{owner}.{name} is provided by a plugin that is not active: {command}"
        raise UnknownNameError(text, name)
    raise UnknownNameError(f"{owner} has no attribute {name!r}.{did_you_mean(name, known)}", name)
