"""Check that backend, precision, mesh and device work together, from what each declares."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from accelerate_core.backend.precision import Precision
from accelerate_core.config.handlers import TorchDynamoPlugin
from accelerate_core.config.lookup import Sources, resolve_settings
from accelerate_core.config.parallelism import ParallelismConfig
from accelerate_core.config.provenance import SourcedValue
from accelerate_core.contract.capabilities import ACCEPTED_BY_DEFAULT, NEEDS, check_words, lacking
from accelerate_core.errors import ConfigurationError, PluginError, listing
from accelerate_core.plugins.discovery import PluginRecord, installed
from accelerate_core.plugins.selection import Request


def parallelism(
    given: Mapping[str, Any], sources: Sources, request: Request, name: str, backend: Any
) -> ParallelismConfig | None:
    """Return the mesh sizes, after checking them against the backend and the number of processes."""
    config, can = given["parallelism_config"], backend.supports.get("mesh") or ()
    processes = 0 if backend.supports.get("own_mesh") else request.topology.num_processes
    in_file = sources.config is not None and "parallelism_config" in sources.config
    if config is None and not request.env_flag("ACCELERATE_USE_PARALLELISM_CONFIG") and not in_file:
        return _mesh_of(backend, processes) if "dp_shard" in can else None
    resolved, provenance = resolve_settings(ParallelismConfig, config, sources)
    sizes: ParallelismConfig = resolved
    asked = [
        b.origin for n, b in provenance.items() if n.endswith("_size") and b.origin != "default"
    ]
    cannot = [dimension for dimension in sizes.active_mesh_dims if dimension not in can]
    if cannot:
        raise ConfigurationError(
            f"Backend {name!r} does not support the mesh dimension {listing(cannot)} "
            f"(from {', '.join(dict.fromkeys(asked))}); it supports "
            f"{listing(can) if can else 'none'}."
        )
    sizes.check(processes, ", ".join(dict.fromkeys(asked)))
    return sizes


def _mesh_of(backend: Any, processes: int) -> ParallelismConfig:
    """Return the mesh from the backend's settings. By default, all ranks shard.

    Args:
        processes: the number of processes, or 0 if the backend checks the sizes itself.
    """
    own = backend.core_defaults().get("parallelism_config")
    if own is None:
        return ParallelismConfig(dp_shard_size=max(processes, 1))
    parts = own.total_size // own.dp_shard_size
    sizes: ParallelismConfig = dataclasses.replace(own, dp_shard_size=max(processes // parts, 1))
    sizes.check(processes, f"backend {backend.name}")
    return sizes


def check_needs(precision: Any, record: PluginRecord) -> None:
    """Check that a precision declares the needs that follow from the methods it overrides."""
    label = f"the precision plugin {record.label}"
    check_words(precision, precision.needs, NEEDS, f"needs of {label}")
    check_words(precision, precision.supports, ("compile", "mesh"), f"supports of {label}")
    own = type(precision)
    for method, words in (
        ("autocast", ("autocast",)),
        ("scaler", ("loss_scaling",)),
        ("convert", ("modules", "parameters", "subclasses")),
    ):
        does = getattr(own, method, None) is not getattr(Precision, method, None)
        does = does or (method == "autocast" and precision.dtype is not None)
        if does and not precision.needs & {*words}:
            raise PluginError(
                f"{label} overrides {method!r} but does not declare it: add {listing(words)} to its `needs`."
            )


def check_device(backend: Any, record: PluginRecord, kind: str, origin: str) -> None:
    """Refuse to run a backend on a type of device it does not declare.

    Args:
        kind: the type, such as "cpu".
        origin: where this choice came from.

    Raises:
        ConfigurationError: the backend declares other types.
    """
    declared = backend.supports.get("devices")
    if declared is None or kind in declared:
        return
    ways = "Choose another backend"
    if "cpu" in declared:
        ways += " or the CPU: Accelerator(cpu=True), ACCELERATE_USE_CPU=1, launch --cpu"
    elif kind == "cpu":
        ways += f", or use a machine with {listing(declared)} and don't request the CPU"
    else:
        ways += " or another device, for example with ACCELERATE_TORCH_DEVICE"
    raise ConfigurationError(
        f"Backend {record.label} does not run on the device type {kind!r} ({origin}); it declares "
        f"devices={listing(declared)}. {ways}."
    )


def refuse_unasked(active: Collection[str], sources: Sources) -> None:
    """Refuse a section of the config file for a precision or an extension that is not active.

    Args:
        active: labels of the active plugins.
    """
    ways = {"precision": "mixed_precision", "extension": "ACCELERATE_PLUGINS"}
    for record in [one for kind in ways for one in installed().of_kind(kind)]:
        section = f"{record.name}_config"
        if sources.config and sources.config.get(section) and record.label not in active:
            raise ConfigurationError(
                f"{section} ({sources.config.where(section)}) belongs to the {record.kind} "
                f"{record.name!r}, which is not active. Name it in {ways[record.kind]}, or remove "
                "the section."
            )


def check_supported(
    backend: Any,
    record: PluginRecord,
    precision: Precision,
    provenance: Mapping[str, SourcedValue],
    dynamo: TorchDynamoPlugin,
    sizes: ParallelismConfig | None,
) -> None:
    """Refuse combinations that the backend does not support, before anything is started."""
    device, cpu, chosen = (provenance[n] for n in ("torch_device", "cpu", "mixed_precision"))
    if device.value is not None:
        check_device(backend, record, str(device.value).split(":")[0], device.origin)
    elif cpu.value:
        check_device(backend, record, "cpu", cpu.origin)
    asked = f"mixed_precision={chosen.value!r} (from {chosen.origin})"
    missing = lacking(backend.supports, str(chosen.value), precision.needs)
    if missing:
        accepted = backend.supports.get("accepts", ACCEPTED_BY_DEFAULT)
        own = backend.supports.get("precisions") or ()
        raise ConfigurationError(
            f"Backend {record.name!r} cannot run {asked}, which needs {listing(missing)} ("
            f"{'; '.join(NEEDS[word] for word in missing)}). It accepts {listing(accepted)}"
            f"{f' and implements {listing(own)} itself' if own else ''}. Choose another precision "
            "or another backend."
        )
    for label, one in ((f"Backend {record.name!r}", backend), (asked, precision)):
        if dynamo.enabled and not one.supports.get("compile", True):
            raise ConfigurationError(f"{label} cannot run compiled models; remove dynamo_backend.")
    active, mesh = sizes.active_mesh_dims if sizes else [], precision.supports.get("mesh")
    outside = [dimension for dimension in active if mesh is not None and dimension not in mesh]
    if mesh is not None and outside:
        raise ConfigurationError(
            f"{asked} does not support the mesh dimension {listing(outside)}; it supports {listing(mesh)}."
        )
