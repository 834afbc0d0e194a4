"""The Python side of the fake device: `torch.fake`, autograd of copies, and its collectives."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import backend_registration

from accelerate_core.plugin import ConfigurationError
from accelerate_testing.fake_device import build
from accelerate_testing.fake_device.name import NAME

#: The name of its collectives in torch.distributed.
COLLECTIVES = "fakeccl"
_installed = False
_SKIPPED = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def install(devices: int, memory: int) -> None:
    """Register the device, its module and its collectives with torch."""
    global _installed
    if _installed:
        return
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is not None:
        raise ConfigurationError(
            f"The fake device can't be installed: this process already has {here.type} devices, and "
            "torch supports one type of accelerator per process."
        )
    native = build.load()
    backend_registration.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, sys.modules[__name__])  # type: ignore[no-untyped-call]
    native.start(devices, [memory] * devices, _calling_line)
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    if dist.is_available():
        dist.Backend.register_backend(COLLECTIVES, _collectives, devices=[NAME])
    _installed = True


def _calling_line() -> str:
    """Return the innermost line outside of torch, as `file:line`, and the name of another thread."""
    thread = threading.current_thread()
    place = "" if thread is threading.main_thread() else f" in thread {thread.name}"
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_SKIPPED):
            return f"{frame.filename}:{frame.lineno}{place}"
    return place.strip()


def _collectives(store: Any, rank: int, size: int, timeout: Any) -> Any:
    from torch._C._distributed_c10d import ProcessGroupGloo

    gloo = ProcessGroupGloo(store, rank, size, timeout=timeout)
    return build.load().Collectives(rank, size, gloo)


# ---- what torch expects of a device's module ----

Stream = torch.Stream
Event = torch.Event


def is_available() -> bool:
    """Return whether there is a device."""
    return device_count() > 0


def is_initialized() -> bool:
    """Return True; the device needs no initialization."""
    return True


def init() -> None:
    """Do nothing; the device needs no initialization."""


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    """Return the number of devices."""
    return int(build.load().device_count())


def current_device() -> int:
    """Return the index of the current device."""
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    """Make a device the current one."""
    torch.accelerator.set_device_index(_index(device))


def get_device_name(device: Any = None) -> str:
    """Return a name to show to users."""
    return f"Fake device {_index(device)}"


def get_device_properties(device: Any = None) -> SimpleNamespace:
    """Return the name, the memory in bytes and the version of the driver."""
    _, total = torch.accelerator.get_memory_info(_index(device))
    return SimpleNamespace(
        name=get_device_name(device), total_memory=total, driver_version=torch.__version__
    )


class device:
    """Context manager that changes the current device."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)
        self.before = -1

    def __enter__(self) -> None:
        self.before = current_device()
        set_device(self.index)

    def __exit__(self, *exception: object) -> None:
        set_device(self.before)


def _index(device: Any = None) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return current_device() if device < 0 else device
    index = torch.device(device).index
    return current_device() if index is None else index


class stream:
    """Context manager that changes the current stream. None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self.before: torch.Stream | None = None

    def __enter__(self) -> torch.Stream | None:
        if self.stream is not None:
            self.before = torch.accelerator.current_stream(self.stream.device)
            torch.accelerator.set_stream(self.stream)
        return self.stream

    def __exit__(self, *exception: object) -> None:
        if self.before is not None:
            torch.accelerator.set_stream(self.before)


StreamContext = stream


def current_stream(device: Any = None) -> torch.Stream:
    """Return the current stream of a device."""
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Any = None) -> torch.Stream:
    """Return the stream that a device uses unless another one is set."""
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=_type())


def set_stream(stream: torch.Stream) -> None:
    """Change the current stream."""
    torch.accelerator.set_stream(stream)


def synchronize(device: Any = None) -> None:
    """Wait for all work on a device."""
    torch.accelerator.synchronize(_index(device))


def _type() -> int:
    return int(torch._C._autograd.DeviceType.PrivateUse1.value)


# ---- memory ----

empty_cache = torch.accelerator.empty_cache


def memory_stats(device: Any = None) -> dict[str, Any]:
    """Return the statistics of the device's allocator."""
    return dict(torch.accelerator.memory_stats(_index(device)))


def memory_allocated(device: Any = None) -> int:
    """Return the bytes in use."""
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: Any = None) -> int:
    """Return the most bytes that were in use at the same time."""
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: Any = None) -> int:
    """Return the bytes in use or cached."""
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device: Any = None) -> int:
    """Return the most bytes that were in use or cached at the same time."""
    return torch.accelerator.max_memory_reserved(_index(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    """Start measuring the maxima again."""
    torch.accelerator.reset_peak_memory_stats(_index(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return the free bytes and all bytes of a device."""
    free, total = torch.accelerator.get_memory_info(_index(device))
    return int(free), int(total)


# ---- random numbers ----


def default_generator(device: Any = None) -> torch.Generator:
    """Return the generator that a device's kernels use by default."""
    generator: torch.Generator = build.load().default_generator(_index(device))
    return generator


def get_rng_state(device: Any = NAME) -> torch.Tensor:
    """Return the state of a device's default generator, on the CPU."""
    return default_generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = NAME) -> None:
    """Set the state of a device's default generator."""
    default_generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of all devices' default generators."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the states of all devices' default generators."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    """Seed the current device's default generator."""
    default_generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the default generators of all devices."""
    for index in range(device_count()):
        default_generator(index).manual_seed(seed)


def initial_seed() -> int:
    """Return the seed of the current device's default generator."""
    return default_generator().initial_seed()


# ---- precision ----


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that autocast accepts."""
    return [torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    """Return True."""
    return True
