"""Arguments that earlier versions of Accelerate had, and their current forms."""

from __future__ import annotations

from typing import Any

from accelerate_core import DataLoaderConfiguration, ParallelismConfig
from accelerate_core.plugin import (
    ConfigurationError,
    KwargsHandler,
    listing,
    option,
    settings,
    warn,
)


@settings
class TorchTensorParallelPlugin(KwargsHandler):
    """Deprecated: use `ParallelismConfig(tp_size=...)`."""

    tp_size: int = option(default=1, help="ranks that compute one layer together", ge=1)
    torch_device_mesh: Any = option(default=None, help="ignored: the sizes define the mesh")


def replace_older(given: dict[str, Any]) -> None:
    """Replace older arguments by current ones, in place, with a warning for each.

    Args:
        given: the keyword arguments of `Accelerator`.

    Raises:
        ConfigurationError: an argument has the wrong type, or contradicts `dataloader_config`.
    """
    half = given.pop("fp16", None)
    if half is not None:
        asked = "fp16" if half else "no"
        _warn("fp16", f"mixed_precision={asked!r}")
        given["mixed_precision"] = given.get("mixed_precision") or asked
    parallel = given.pop("torch_tp_plugin", None)
    if parallel is not None:
        if not isinstance(parallel, TorchTensorParallelPlugin):
            raise ConfigurationError(
                "Accelerator(torch_tp_plugin=...) takes a TorchTensorParallelPlugin, not "
                f"{type(parallel).__name__}."
            )
        _warn(
            "torch_tp_plugin", f"parallelism_config=ParallelismConfig(tp_size={parallel.tp_size})"
        )
        if given.get("parallelism_config") is None:
            given["parallelism_config"] = ParallelismConfig(tp_size=parallel.tp_size)
    loading = {name: given.pop(name, None) for name in ("even_batches", "dispatch_batches")}
    loading = {name: value for name, value in loading.items() if value is not None}
    for name, value in loading.items():
        _warn(name, f"dataloader_config=DataLoaderConfiguration({name}={value!r})")
    if loading and given.get("dataloader_config") is not None:
        raise ConfigurationError(
            f"Accelerator received {listing(loading)} and a dataloader_config. Set all of them in "
            "dataloader_config."
        )
    if loading:
        given["dataloader_config"] = DataLoaderConfiguration(**loading)


def _warn(name: str, now: str) -> None:
    # Python shows this warning once per line of the script.
    warn(f"Accelerator({name}=...) is deprecated; use {now}.", FutureWarning)
