"""Lazy import of torch_xla, and its process-wide state: devices, SPMD and the random generator."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob
from typing import Any

import torch

from accelerate_core.plugin import (
    ConfigurationError,
    MissingPluginError,
    RuntimeConflictError,
    process_global,
)

#: Each torch_xla is built for the torch with the same version number.
_PAIR = "Run: pip install torch=={0} torch_xla=={0}"


_DEVICE = "PJRT_DEVICE"
_chose_by_itself = False


def named_device(environ: Mapping[str, str]) -> str | None:
    """Return the type of device requested by `PJRT_DEVICE`, or None."""
    there = importlib.util.find_spec("torch_xla") is not None and not _chose_by_itself
    return environ.get(_DEVICE) if there else None


def has_tpu(environ: Mapping[str, str]) -> bool:
    """Return whether this machine has a TPU and its library, without initialising it."""
    if importlib.util.find_spec("torch_xla") is None:
        return False
    there = glob("/dev/accel[0-9]*") or (glob("/dev/vfio/[0-9]*") and "TPU_NAME" in environ)
    return bool(there) and importlib.util.find_spec("libtpu") is not None


def imported(name: str = "") -> Any:
    """Import torch_xla, or a module of it.

    Raises:
        MissingPluginError: it is not installed.
        ConfigurationError: it was built for another torch.
    """
    global _chose_by_itself
    if "torch_xla" not in sys.modules and _DEVICE not in os.environ:
        _chose_by_itself = True  # importing torch_xla sets the variable
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
            f"torch_xla {has} is built for torch {_minor(has)}, but torch {torch.__version__} is "
            f"installed ({reason}). {_PAIR.format(has)}"
        ) from None


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


@dataclass
class _Switch:
    """Turns on SPMD for this process. XLA cannot turn it off again."""

    was_on: bool = False
    ours: bool = False

    def on(self) -> None:
        if imported("runtime").is_spmd():
            self.was_on = True
            return
        if _is_touched() and not self.was_on:
            raise RuntimeConflictError(
                "SPMD must be turned on before the process uses an XLA device, but it already has. "
                "Create the Accelerator or call torch_xla.runtime.use_spmd() earlier."
            )
        # What `use_spmd` does, without its warning about devices used by an earlier Accelerator.
        os.environ[_VARIABLE] = "1"
        self.was_on = True
        self.ours = True

    def off(self) -> None:
        if self.ours:
            os.environ.pop(_VARIABLE, None)


_VARIABLE = "XLA_USE_SPMD"
_switch = _Switch()


def refuse_after_spmd() -> None:
    """Reject an Accelerator without a mesh in a process that uses SPMD.

    Raises:
        RuntimeConflictError: an earlier Accelerator had a mesh.
    """
    if _switch.was_on and imported("runtime").global_runtime_device_count() > 1:
        raise RuntimeConflictError(
            "An earlier Accelerator in this process had a mesh, and XLA cannot turn SPMD off again. "
            "Pass a ParallelismConfig, or start a new process."
        )


def spmd_devices() -> int:
    """Turn SPMD on, and return the number of devices, which is the size of the mesh."""
    _switch.on()
    return int(imported("runtime").global_runtime_device_count())


def start_spmd(sizes: Mapping[str, int]) -> Any:
    """Turn SPMD on for this process and return a mesh of all devices.

    Raises:
        RuntimeConflictError: another Accelerator in this process has another mesh, or the process
            used a device before.
        ConfigurationError: the number of devices does not match the sizes.
    """
    return process_global(
        "torch_xla.spmd", dict(sizes), lambda: _mesh(sizes), lambda _: _switch.off()
    )


def _mesh(sizes: Mapping[str, int]) -> Any:
    runtime, sharding = imported("runtime"), imported("distributed.spmd")
    count = spmd_devices()
    needed = math.prod(sizes.values())
    if needed != count:
        how = " (CPU_NUM_DEVICES)" if runtime.device_type() == "CPU" else ""
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigurationError(
            f"ParallelismConfig needs a mesh of {product} = {needed} devices, but XLA has "
            f"{count}{how}. With SPMD, the mesh must use all devices. Change a size."
        )
    import numpy

    mesh = sharding.Mesh(numpy.arange(count), tuple(sizes.values()), tuple(sizes))
    sharding.set_global_mesh(mesh)
    return mesh


def _is_touched() -> bool:
    return bool(imported()._XLAC._xla_runtime_is_initialized())


@contextmanager
def synced() -> Iterator[None]:
    """Run pending operations, and restore the random generator, which each `sync` advances."""
    model = imported("core.xla_model")
    seed = model.get_rng_state()
    imported().sync()
    try:
        yield
    finally:
        model.set_rng_state(seed)


class Generator:
    """XLA's random generator with the interface of `torch.cuda`. The state is the seed's 8 bytes."""

    def is_available(self) -> bool:
        """Return True, because this object only exists when the backend is active."""
        return True

    def get_rng_state(self) -> torch.Tensor:
        """Return the next seed as bytes."""
        seed: int = imported("core.xla_model").get_rng_state()
        return torch.tensor(list(seed.to_bytes(8, "little")), dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Set the next seed."""
        imported("core.xla_model").set_rng_state(int.from_bytes(state.tolist(), "little"))


def device_kind() -> str:
    """Return the type of XLA's devices, such as `TPU` or `CPU`."""
    return str(imported("runtime").device_type())


def refuse_unconnected_processes(num_processes: int) -> None:
    """Reject several processes on the CPU, where each would train alone without an error.

    Raises:
        ConfigurationError: there are several. The message says how to use several devices instead.
    """
    kind = os.environ.get(_DEVICE, "").upper() or device_kind()
    if num_processes > 1 and kind.startswith("CPU"):
        raise ConfigurationError(
            f"{num_processes} processes were started for XLA on the CPU, where XLA does not connect "
            "processes, so each would train alone. Start one process. For several devices, set "
            f"CPU_NUM_DEVICES={num_processes} and pass a ParallelismConfig, such as "
            f"dp_replicate_size={num_processes}."
        )


def register_compiler(dynamo: Any) -> None:
    """Register torch_xla's compiler under Accelerate's older name for it, if that was requested."""
    name = str(dynamo.backend).lower()
    if dynamo.enabled and name in _COMPILERS:
        from torch._dynamo.backends import registry

        if name not in registry.list_backends(exclude_tags=()):
            registry.register_backend(registry.lookup_backend("openxla"), name=name)


_COMPILERS = ("torchxla_trace_once", "aot_torchxla_trace_once")
