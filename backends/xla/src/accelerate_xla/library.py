"""torch_xla, imported when it is used, and what a process has of it once."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from glob import glob
from typing import Any

import torch

from accelerate_core.distributed.process import once
from accelerate_core.errors import ConfigurationError, MissingPluginError, RuntimeConflictError

#: The torch that each torch_xla is built for has its number.
_PAIR = "Run: pip install torch=={0} torch_xla=={0}"


def is_installed() -> bool:
    """Tell whether torch_xla is there, without importing it."""
    return importlib.util.find_spec("torch_xla") is not None


def has_tpu(environ: Mapping[str, str]) -> bool:
    """Tell whether this machine has a TPU and its library, without touching it."""
    there = glob("/dev/accel[0-9]*") or (glob("/dev/vfio/[0-9]*") and "TPU_NAME" in environ)
    return bool(there) and importlib.util.find_spec("libtpu") is not None


def imported(name: str = "") -> Any:
    """Import torch_xla, or a module of it.

    Raises:
        MissingPluginError: it is not installed.
        ConfigurationError: it was built for another torch.
    """
    try:
        return importlib.import_module(f"torch_xla.{name}" if name else "torch_xla")
    except ModuleNotFoundError as error:
        if error.name != "torch_xla":
            raise
        raise MissingPluginError(
            f"The backend 'xla' needs torch_xla, which is not installed. {_PAIR.format('2.9.0')}"
        ) from None
    except ImportError as error:
        has = importlib.metadata.version("torch_xla")
        reason = str(error).splitlines()[0]
        raise ConfigurationError(
            f"torch_xla {has} is built for torch {_minor(has)}, and torch here is "
            f"{torch.__version__} ({reason}). {_PAIR.format(has)}"
        ) from None


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def start_spmd(sizes: Mapping[str, int]) -> Any:
    """Let this process compute on all devices, as a mesh of these sizes; return the mesh.

    Raises:
        RuntimeConflictError: another Accelerator of this process has another mesh, or the script has
            used a device on its own.
        ConfigurationError: there are more or fewer devices.
    """
    return once("torch_xla.spmd", dict(sizes), lambda: _mesh(sizes), lambda _: None)


def _mesh(sizes: Mapping[str, int]) -> Any:
    runtime, sharding = imported("runtime"), imported("distributed.spmd")
    if not runtime.is_spmd():
        # Its switch is looked at when the first device is touched, and never goes off again.
        if _is_touched():
            raise RuntimeConflictError(
                "SPMD has to be on before a device of XLA is used, and this process has used one. "
                "Construct the Accelerator first, or call torch_xla.runtime.use_spmd() first."
            )
        runtime.use_spmd()
    count = int(runtime.global_runtime_device_count())
    needed = 1
    for size in sizes.values():
        needed *= size
    if needed != count:
        how = " (CPU_NUM_DEVICES)" if runtime.device_type() == "CPU" else ""
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigurationError(
            f"ParallelismConfig asks for a mesh of {product} = {needed} devices, and XLA has "
            f"{count}{how} here. Under SPMD one process computes on all of them: change a size."
        )
    import numpy

    names = tuple(sizes)
    mesh = sharding.Mesh(numpy.arange(count), tuple(sizes[name] for name in names), names)
    sharding.set_global_mesh(mesh)
    return mesh


def _is_touched() -> bool:
    return bool(imported()._XLAC._xla_runtime_is_initialized())


@contextmanager
def settled() -> Iterator[None]:
    """Run what is pending, and leave the generator as it was: each `sync` moves it on."""
    model = imported("core.xla_model")
    seed = model.get_rng_state()
    imported().sync()
    try:
        yield
    finally:
        model.set_rng_state(seed)


def device_kind() -> str:
    """Return what XLA computes on here: `TPU`, `CPU`, ..."""
    return str(imported("runtime").device_type())


def refuse_blind_processes(num_processes: int) -> None:
    """Refuse several processes on the CPU: each would train alone, and nothing would fail.

    Raises:
        ConfigurationError: with the way to have several devices there.
    """
    kind = os.environ.get("PJRT_DEVICE", "").upper() or device_kind()
    if num_processes > 1 and kind.startswith("CPU"):
        raise ConfigurationError(
            f"{num_processes} processes were started for XLA on the CPU, where processes do not "
            "see each other: each would train alone. Start one process; for several devices "
            f"set CPU_NUM_DEVICES={num_processes} and pass a ParallelismConfig, such as "
            f"dp_replicate_size={num_processes}."
        )
