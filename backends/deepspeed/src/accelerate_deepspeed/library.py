"""Lazy import of deepspeed, its connection to the process group, and its own checks of configs."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pydantic
import torch
import torch.distributed as dist

from accelerate_core.plugin import ConfigurationError, MissingPluginError, did_you_mean, listing
from accelerate_deepspeed.config import AUTO, HfDeepSpeedConfig

_groups_at_first: dict[str, Any] = {}
_connected: list[Any] = []
#: Environment variables that are set from `connect` to `disconnect`.
_variables = ExitStack()


def load(device: torch.device) -> Any:
    """Import deepspeed for a type of device, and return it.

    The first import takes seconds, so it only happens when an Accelerator needs it. DeepSpeed's
    collectives with shared memory on the CPU are disabled, because they take minutes to compile and
    gloo does the same.

    Raises:
        MissingPluginError: deepspeed is not installed.
        ConfigurationError: deepspeed was imported before for another type of device.
    """
    with _environment({"DS_ACCELERATOR": device.type}):
        try:
            import deepspeed
        except ModuleNotFoundError as error:
            if error.name != "deepspeed":
                raise
            raise MissingPluginError(
                "The backend deepspeed needs the package deepspeed, which is not installed. Run: "
                'pip install "deepspeed>=0.19"'
            ) from None
        found = deepspeed.accelerator.get_accelerator()._name
    if found != device.type:
        raise ConfigurationError(
            f"This Accelerator runs on {device.type!r}, but deepspeed was set up for {found!r} by "
            "DS_ACCELERATOR or because it was imported before. Create the Accelerator before "
            f"importing deepspeed, or set DS_ACCELERATOR={device.type}."
        )
    # Without this, accessing the attribute would compile test programs.
    if "__compatible_ops__" not in vars(deepspeed.ops):
        deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    return deepspeed


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """A context that sets environment variables, unless they are already set."""
    new = {name: text for name, text in wanted.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


def rank_environment(accelerator: Any) -> AbstractContextManager[None]:
    """Return a context with torchrun's variables, which deepspeed reads, if they are not set."""
    return _environment(
        {
            "RANK": str(accelerator.process_index),
            "LOCAL_RANK": str(accelerator.local_process_index),
            "WORLD_SIZE": str(accelerator.num_processes),
            "LOCAL_WORLD_SIZE": str(accelerator.local_process_count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
        }
    )


def connect(accelerator: Any) -> Any:
    """Import deepspeed, connect it to the existing process group, and return it."""
    deepspeed = load(accelerator.device)
    # DeepSpeed calls these functions in each step, which the user cannot change.
    old = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
    warnings.filterwarnings("ignore", old, FutureWarning)
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    # Stage 3 reads LOCAL_RANK in each forward. It is missing if no launcher started the process.
    rank = str(accelerator.local_process_index)
    _variables.enter_context(_environment({"LOCAL_RANK": rank}))
    if not _groups_at_first:
        for name, value in vars(groups).items():
            if not name.startswith("__") and isinstance(value, dict | bool | int | None):
                _groups_at_first[name] = copy.copy(value)
    sizes = accelerator.parallelism_config
    now = [dist.group.WORLD, sizes.tp_size, sizes.sp_size]
    if _connected == now:
        return deepspeed
    if _connected:
        # The groups of an earlier Accelerator no longer exist, or have other sizes.
        comm.cdb = None
        for name, value in _groups_at_first.items():
            setattr(groups, name, copy.copy(value))
    with rank_environment(accelerator):
        deepspeed.init_distributed(
            dist_backend=dist.get_backend(),
            auto_mpi_discovery=False,
            verbose=False,
            timeout=accelerator.group_timeout or dist.default_pg_timeout,
        )
    _connected[:] = now
    return deepspeed


def disconnect() -> None:
    """Remove the environment variables that `connect` set."""
    _variables.close()


# --- its own checks of a config -------------------------------------------------------------------

#: Keys of sections in which DeepSpeed does not check for unknown keys.
_LOOSE = {
    "torch_autocast": ("enabled", "dtype", "lower_precision_safe_modules"),
    "optimizer": ("type", "params", "legacy_fusion"),
    "scheduler": ("type", "params"),
    "activation_checkpointing": (
        "partition_activations", "contiguous_memory_optimization", "cpu_checkpointing",
        "number_checkpoints", "synchronize_checkpoint_boundary", "profile",
    ),
}  # fmt: skip


def check_sections(config: HfDeepSpeedConfig) -> None:
    """Check the keys and values of a config's sections, with DeepSpeed's own models if it has one.

    Raises:
        ConfigurationError: a key is unknown or a value is invalid.
    """
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "bfloat16": DeepSpeedBF16Config,
        "tensor_parallel": TPTrainingConfig,
    }
    for section, model in models.items():
        if config.has(section):
            _check_section(config, section, model)
    for section, known in _LOOSE.items():
        there = config.get_value(section)
        for key in there if isinstance(there, dict) else ():
            if key not in known:
                raise ConfigurationError(
                    f"DeepSpeed has no setting {section}.{key} (in {config.origin})."
                    f"{did_you_mean(str(key), known)}"
                )
    for section, own, torchs in (
        ("optimizer", DEEPSPEED_OPTIMIZERS, torch.optim),
        ("scheduler", VALID_LR_SCHEDULES, torch.optim.lr_scheduler),
    ):
        if not config.has(section):
            continue
        kind = config.get_value(f"{section}.type")
        if not isinstance(kind, str):
            raise ConfigurationError(
                f"{section} in {config.origin} needs a key type, such as {own[0]!r}."
            )
        if not {kind, kind.lower()} & set(own) and not hasattr(torchs, kind):
            raise ConfigurationError(
                f"{section}.type={kind!r} (in {config.origin}) exists neither in DeepSpeed nor in "
                f"torch. DeepSpeed has {listing(own)}.{did_you_mean(kind, own)}"
            )


def _check_section(config: HfDeepSpeedConfig, section: str, model: Any) -> None:
    there = config.get_value(section)
    if not isinstance(there, dict):
        raise ConfigurationError(f"{section} of {config.origin} must be an object, not {there!r}.")
    try:
        model(**{key: value for key, value in there.items() if value != AUTO})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        text = first["msg"]
        if first["type"] == "extra_forbidden":
            fields = model.model_fields.items()
            known = [one for key, info in fields for one in (key, info.alias) if one]
            text = f"DeepSpeed has no such setting.{did_you_mean(name, known)}"
        shown = f"{section}.{name}={first.get('input')!r} ({config.where(f'{section}.{name}')})"
        raise ConfigurationError(f"{shown}: {text.rstrip('.')}.") from None
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigurationError(f"{section} of {config.origin}: {error}") from None


def check_disks(config: HfDeepSpeedConfig) -> None:
    """Check that the library for offload to nvme is available.

    Raises:
        ConfigurationError: the config offloads to nvme, but the library cannot be compiled.
    """
    for kind in ("optimizer", "param"):
        name = f"zero_optimization.offload_{kind}.device"
        if config.get_value(name) != "nvme":
            continue
        from deepspeed.ops.op_builder import AsyncIOBuilder

        if not AsyncIOBuilder().is_compatible(verbose=False):
            raise ConfigurationError(
                f"{config.shown(name)} needs DeepSpeed's op async_io, which cannot be compiled on "
                "this machine. Install libaio with its headers (Debian: apt install libaio-dev) and "
                "a C++ compiler, or offload to the CPU."
            )
