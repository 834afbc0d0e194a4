"""Is what was chosen possible, and does it fit together? Each error names value, source and way out."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from typing import Any

from accelerate_core.config.files import ConfigFile
from accelerate_core.config.provenance import Because
from accelerate_core.config.truth import truth
from accelerate_core.errors import ConfigurationError, did_you_mean, listing
from accelerate_core.plugins import catalog
from accelerate_core.plugins.discovery import installed
from accelerate_launch import devices, peer
from accelerate_launch.cluster import ClusterEnvironment
from accelerate_launch.options import LAUNCH_OPTIONS, known_yaml_keys
from accelerate_launch.plan import LaunchPlan
from accelerate_launch.schemas import WITH_SETTINGS

#: Begins the origin of a value that follows from another key of the config file.
FOLLOWS = "follows from "

_RENDEZVOUS = ("static", "c10d", "etcd", "etcd-v2")
_TEE = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*")
_CONF = re.compile(r"[^=,\s]+=[^=,]*(,[^=,\s]+=[^=,]*)*")


def known_keys() -> list[str]:
    """Return the top-level keys of a config file that somebody here reads, or knows."""
    ours = [*known_yaml_keys(), *(key for key in installed().triggers if key == key.lower())]
    theirs = [*catalog.SECTIONS, *peer.KEYS, *peer.OBSOLETE_KEYS, *peer.IGNORED_KEYS]
    theirs.append("parallelism_config")
    named = [f"{one.name}_config" for one in installed().plugins if one.kind in WITH_SETTINGS]
    return list(dict.fromkeys([*ours, *theirs, *named]))


def obsolete_in(config: ConfigFile) -> str:
    """Return one line about keys that no version of anything reads any more; empty if there is none."""
    found = [key for key in config if key in peer.OBSOLETE_KEYS]
    said = "; ".join(f"{key}: {peer.OBSOLETE_KEYS[key]}" for key in found)
    return f"{config.path} has keys that say nothing today. {said}" if found else ""


def check_keys(config: ConfigFile) -> None:
    """Refuse keys that nobody reads, here or in a section of the core's own.

    Raises:
        ConfigurationError: with file, line and the nearest right name.
    """
    _check_environment(config)  # first: files for a cloud have keys of their own
    known = known_keys()
    for key in config:
        if key not in known:
            hint = did_you_mean(str(key), known)
            raise ConfigurationError(f"Unknown key {str(key)!r} in {config.where(str(key))}.{hint}")
    sections: dict[str, list[str]] = {"mpirun_config": ["mpirun_ccl"]}
    for option in LAUNCH_OPTIONS:
        for name in option.yaml:
            section, _, inner = name.rpartition(".")
            sections.setdefault(section, []).append(inner)
    section = "mpirun_config"
    inside = config.get(section)
    if inside is None:
        return
    if not isinstance(inside, dict):
        raise ConfigurationError(
            f"{section}: {inside!r} ({config.where(section)}) must be a mapping of keys to values."
        )
    for key in inside:
        if key not in sections[section]:
            raise ConfigurationError(
                f"Unknown key {str(key)!r} in {section} of {config.where(f'{section}.{key}')}."
                f"{did_you_mean(str(key), sections[section])}"
            )


def _check_environment(config: ConfigFile) -> None:
    said = config.get("compute_environment")
    allowed = ("LOCAL_MACHINE", "AMAZON_SAGEMAKER")
    if said is None:
        return
    where = config.where("compute_environment")
    if said == allowed[1]:
        raise ConfigurationError(
            f"compute_environment: {said} ({where}). {peer.REFUSED_OPTIONS['aws_access_key_id']}"
        )
    if said != allowed[0]:
        raise ConfigurationError(
            f"compute_environment: {said!r} ({where}) is not one of {listing(allowed)}."
            f"{did_you_mean(str(said), allowed)}"
        )


def backend_of(config: ConfigFile, backend: Because) -> Because:
    """Take the backend that a file's `distributed_type` asks for, unless one is named.

    Raises:
        ConfigurationError: it is no type that is known.
    """
    said = config.get("distributed_type")
    if said is None:
        return backend
    kind = "NO" if said is False else str(said).upper()  # YAML reads a bare NO as false
    known = ["NO", "MULTI_CPU", "MULTI_GPU", "MPS", *catalog.DISTRIBUTED_TYPES]
    where = config.where("distributed_type")
    if kind not in known and not re.fullmatch(r"MULTI_[A-Z]+", kind):
        raise ConfigurationError(
            f"distributed_type: {said!r} ({where}) is not known; known are {listing(known)}."
            f"{did_you_mean(kind, known)}"
        )
    if backend.value is not None or kind not in catalog.DISTRIBUTED_TYPES:
        return backend
    return Because(catalog.DISTRIBUTED_TYPES[kind], where)


def cpu_of(config: ConfigFile, cpu: Because) -> Because:
    """Run on the CPU where a file's `distributed_type` says so and nothing else is said."""
    if cpu.origin == "default" and str(config.get("distributed_type")).upper() == "MULTI_CPU":
        return Because(True, f"{FOLLOWS}{config.where('distributed_type')}")
    return cpu


def check_formats(chosen: Mapping[str, Because]) -> None:
    """Check texts that torch would refuse, or misread, later."""
    backend = chosen["rdzv_backend"]
    if backend.value not in _RENDEZVOUS:
        from importlib.metadata import entry_points

        known = [*_RENDEZVOUS, *(one.name for one in entry_points(group="torchrun.handlers"))]
        if backend.value not in known:
            raise ConfigurationError(
                f"rdzv_backend={backend.value!r} ({backend.origin}) is not one of {listing(known)}."
                f"{did_you_mean(str(backend.value), known)}"
            )
    patterns = {"rdzv_conf": (_CONF, "key=value,key=value"), "tee": (_TEE, "0 to 3, or 0:1,1:3")}
    for name, (pattern, form) in patterns.items():
        said = chosen[name]
        if said.value is not None and not pattern.fullmatch(str(said.value)):
            raise ConfigurationError(
                f"{name}={said.value!r} ({said.origin}) must have the form {form}."
            )
    address = chosen["main_process_ip"]
    if address.value is not None and not re.fullmatch(r"[\w.:%-]+", str(address.value)):
        raise ConfigurationError(
            f"main_process_ip={address.value!r} ({address.origin}) must be an address or a host name."
        )
    interval = chosen["monitor_interval"]
    if not 0 < interval.value < 3600:
        raise ConfigurationError(
            f"monitor_interval={interval.value} ({interval.origin}) must be a positive number of "
            "seconds."
        )


def processes(
    chosen: Mapping[str, Because], environ: Mapping[str, str], around: ClusterEnvironment
) -> Because:
    """Return how many processes there are on all machines together, and why."""
    said, machines = chosen["num_processes"], chosen["num_machines"].value
    if around.ranks and said.value != int(around.ranks["WORLD_SIZE"]):
        raise ConfigurationError(
            f"num_processes={said.value} ({said.origin}) contradicts what is around: "
            f"{around.values['num_processes'].origin}. Leave it out."
        )
    on_cpu = _on(chosen["cpu"].value)
    if chosen["multi_gpu"].value and on_cpu:
        raise ConfigurationError(
            f"--multi_gpu contradicts running on the CPU ({chosen['cpu'].origin})."
        )
    ids = gpu_ids(chosen["gpu_ids"])
    if chosen["multi_gpu"].value and not ids and devices.count_accelerators(environ) == 0:
        raise ConfigurationError(
            "--multi_gpu was given, but torch sees no accelerator on this machine. For several "
            "processes on the CPU use --cpu --num_processes N."
        )
    if around.ranks:
        return said
    if said.value is not None:
        if said.value % machines:
            raise ConfigurationError(
                f"num_processes={said.value} ({said.origin}) cannot be shared out evenly over "
                f"num_machines={machines}; it counts the processes of all machines together."
            )
        return said
    if on_cpu:
        return Because(machines, f"one per machine, because of {chosen['cpu'].origin}")
    if ids:
        return Because(len(ids) * machines, f"accelerators in gpu_ids, {chosen['gpu_ids'].origin}")
    visible = devices.count_accelerators(environ)
    if visible:
        return Because(visible * machines, f"{visible} visible accelerator(s) per machine")
    return Because(machines, "no accelerator is visible")


def _on(value: Any) -> bool:
    return value is True or bool(truth(value))


def gpu_ids(because: Because) -> list[str]:
    """Return the numbers of the devices to use; empty for all."""
    if because.value is None or str(because.value).lower() == "all":
        return []
    ids = [part.strip() for part in str(because.value).split(",") if part.strip()]
    if len(set(ids)) != len(ids) or not all(part.isdigit() for part in ids):
        raise ConfigurationError(
            f"gpu_ids={because.value!r} ({because.origin}) must be different numbers joined by "
            "commas, such as 0,2, or 'all'."
        )
    return ids


def check_machines(chosen: Mapping[str, Because], around: ClusterEnvironment) -> None:
    """Check what is said about machines and ports against each other."""
    if around.ranks:
        named = chosen["launcher"]
        if named.value == "torchrun" and int(around.ranks["WORLD_SIZE"]) > 1:
            raise ConfigurationError(
                f"launcher=torchrun ({named.origin}) inside of {around.ranks['WORLD_SIZE']} ranks that "
                "are started already would make as many worlds of them: leave it out."
            )
        return
    value = {name: because.value for name, because in chosen.items()}
    machines, rank = value["num_machines"], value["machine_rank"]
    if value["launcher"] == "simple" and value["num_processes"] > 1:
        raise ConfigurationError(
            f"launcher=simple ({chosen['launcher'].origin}) starts one process, and "
            f"{value['num_processes']} are asked for ({chosen['num_processes'].origin}): leave it "
            "out, or name torchrun."
        )
    if rank >= machines:
        raise ConfigurationError(
            f"machine_rank={rank} ({chosen['machine_rank'].origin}) must be less than "
            f"num_machines={machines} ({chosen['num_machines'].origin})."
        )
    if machines > 1 and not value["main_process_ip"]:
        raise ConfigurationError(
            f"num_machines={machines} needs --main_process_ip: the address of machine 0."
        )
    address = value["main_process_ip"]
    if machines == 1 and address and value["num_processes"] > 1 and not _is_here(address):
        raise ConfigurationError(
            f"main_process_ip={address} ({chosen['main_process_ip'].origin}) is no address of this "
            "machine, the only one of this launch. Leave it out, or give --num_machines."
        )
    port = value["main_process_port"]
    if port and port > 65535:
        raise ConfigurationError(
            f"main_process_port={port} ({chosen['main_process_port'].origin}) must be below 65536."
        )


def check_port(plan: LaunchPlan) -> None:
    """Refuse a port of this machine that somebody listens on already."""
    port, alone = plan.main_process_port, plan.num_machines == 1
    several = plan.num_processes > 1 and "RANK" not in plan.environment
    if port and several and alone and devices.is_port_in_use(port):
        raise ConfigurationError(
            f"Port {port} ({plan.because['main_process_port'].origin}) is in use on this machine. "
            "Choose another, or leave it out and a free one is taken."
        )


def _is_here(address: str) -> bool:
    """Tell whether an address is one of this machine's; a name that nobody resolves is none."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, where in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(where)
            except OSError:
                continue
            return True
    return False
