"""Read environment variables and facts about the machine, and change variables temporarily."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from accelerate_core.booleans import OFF, ON
from accelerate_core.plugin import ConfigurationError, env_flag, listing, parse_bool
from accelerate_launch.affinity import set_numa_affinity
from accelerate_launch.mpi import FLAVOURS

#: Named after Accelerate's module, because scripts set log levels by that name.
logger = logging.getLogger("accelerate.utils.environment")

#: In Accelerate this is a separate function that doesn't use its cache. Here there is no cache.
override_numa_affinity = set_numa_affinity


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Parse a boolean as 1 or 0, or with `to_bool` as True or False.

    Raises:
        ConfigurationError: the string is not a boolean.
    """
    said = parse_bool(value)
    if said is None:
        raise ConfigurationError(f"{value!r} is not a boolean. Use one of {listing(ON + OFF)}.")
    return said if to_bool else int(said)


def get_int_from_env(env_keys: Sequence[str], default: int) -> int:
    """Return the value of the first variable that is a non-negative number.

    Args:
        env_keys: names of variables.
        default: the value if there is none.

    Raises:
        ConfigurationError: a variable is not a whole number.
    """
    for key in env_keys:
        text = os.environ.get(key)
        if text is None:
            continue
        try:
            number = int(text)
        except ValueError:
            raise ConfigurationError(
                f"The environment variable {key}={text!r} must be a whole number."
            ) from None
        if number >= 0:
            return number
    return default


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return a boolean variable, or `default` if it is not set.

    Raises:
        ConfigurationError: the value is not a boolean; the text names the variable.
    """
    return env_flag(os.environ, key, default)


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return a variable, or `default` if it is not set."""
    return os.environ.get(key, str(default))


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return the libraries in `library_names` that this process has already imported.

    Args:
        library_names: import names.
    """
    return [name for name in library_names if name in sys.modules]


def convert_dict_to_env_variables(current_env: dict[str, str]) -> list[str]:
    """Return lines `NAME=value`, without entries that a shell or file could misread.

    Args:
        current_env: values by name.
    """
    lines = []
    for key, value in current_env.items():
        if all(not set(text) & set(";\n<>") for text in (key, value)) and key:
            lines.append(f"{key}={value}\n")
        else:
            logger.warning("The environment variable %r is skipped: illegal character.", key)
    return lines


@contextmanager
def clear_environment() -> Iterator[None]:
    """Clear all environment variables inside the block, and restore them after it."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _restore(before: dict[str, str | None]) -> None:
    for key, value in before.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value


@contextmanager
def _accelerate_variables_kept() -> Iterator[None]:
    def ours() -> dict[str, str]:
        return {k: v for k, v in os.environ.items() if k.startswith("ACCELERATE_")}

    before = ours()
    try:
        yield
    finally:
        _restore({**dict.fromkeys(ours()), **before})


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Decorate a function, or all test methods of a class and its subclasses.

    Variables that begin with `ACCELERATE_` are restored after each call.
    """
    if inspect.isclass(func_or_cls):
        for name, member in list(vars(func_or_cls).items()):
            if callable(member) and (name.startswith("test") or name in ("setUp", "setup_method")):
                setattr(func_or_cls, name, purge_accelerate_environment(member))
        func_or_cls.__init_subclass__ = classmethod(  # type: ignore[assignment]
            lambda cls, **_: purge_accelerate_environment(cls)
        )
        return func_or_cls
    function: Callable[..., Any] = func_or_cls
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def asynchronous(*args: Any, **kwargs: Any) -> Any:
            with _accelerate_variables_kept():
                return await function(*args, **kwargs)

        return asynchronous

    @functools.wraps(function)
    def synchronous(*args: Any, **kwargs: Any) -> Any:
        with _accelerate_variables_kept():
            return function(*args, **kwargs)

    return synchronous


@dataclass
class CPUInformation:
    """The rank of this process among processes on CPUs, according to the launcher's variables."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Read ranks and sizes from the variables of torchrun or an MPI."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    keys = zip(names, *(flavour.ranks for flavour in FLAVOURS), strict=True)
    return CPUInformation(*map(get_int_from_env, keys, (0, 1, 0, 1)))


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names and the number of the accelerators that torch sees."""
    import torch

    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if not count:
        return [], 0
    device = torch.accelerator.current_accelerator()
    kind = device.type if device else "accelerator"
    name_of = getattr(torch.get_device_module(kind), "get_device_name", None)
    return [name_of(i) if name_of else kind for i in range(count)], count


def get_driver_version() -> str:
    """Return the version of NVIDIA's driver.

    Raises:
        OSError, subprocess.CalledProcessError: nvidia-smi is not installed, or finds no device.
    """
    import subprocess

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.check_output(command, text=True, timeout=60).split("\n")[0].strip()


def get_current_device_type() -> tuple[str, str]:
    """Return the device type, and Accelerate's name for several devices: `("cpu", "MULTI_CPU")`."""
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    kind = device.type if device else "cpu"
    return kind, "MULTI_" + ("GPU" if kind == "cuda" else kind.upper())


def check_cuda_p2p_ib_support() -> bool:
    """Return whether all CUDA devices can access each other's memory; True if there are none."""
    import torch

    count = torch.cuda.device_count()
    return all(
        torch.cuda.can_device_access_peer(a, b)
        for a in range(count)
        for b in range(count)
        if a != b
    )


def check_cuda_fp8_capability() -> bool:
    """Return whether the current CUDA device supports fp8 (compute capability 8.9 or higher)."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


USE_TORCH_XLA = parse_flag_from_env("USE_TORCH_XLA", default=True)


def is_torch_distributed_available() -> bool:
    """Return whether this build of torch has torch.distributed."""
    import torch

    return torch.distributed.is_available()
