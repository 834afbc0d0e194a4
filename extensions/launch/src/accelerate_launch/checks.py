"""Check the values of a launch, alone and against each other.

Each error names the value, where it came from, and what to do.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points

from accelerate_core.plugin import (
    ConfigFile,
    ConfigurationError,
    Mistakes,
    SourcedValue,
    did_you_mean,
    installed,
    listing,
    parse_bool,
)
from accelerate_core.plugins import catalog
from accelerate_launch import accelerate_options, devices
from accelerate_launch.cluster import ClusterEnvironment
from accelerate_launch.machine_0 import is_here
from accelerate_launch.options import LAUNCH_OPTIONS
from accelerate_launch.plan import COUNTED, LaunchPlan, machine_range
from accelerate_launch.schemas import WITH_SETTINGS

logger = logging.getLogger(__name__)

#: How the origin begins if a value follows from another key of the config file.
FOLLOWS = "follows from "

#: Keys of config files that have no launch option.
_MORE_KEYS = ["backend", "compute_environment", "distributed_type", "torch_device"]
#: Launchers that need the address of machine 0. Others may start all machines and know it themselves.
_NEEDS_ADDRESS = (None, "torchrun", "srun", "mpirun")
_RENDEZVOUS = ("static", "c10d", "etcd", "etcd-v2")
#: For each option, the pattern that its value must match and the words for it in an error.
FORMS = {
    "rdzv_conf": (
        r"[^=,\s]+=[^=,]*(,[^=,\s]+=[^=,]*)*",
        "have the form key=value,key=value",
    ),
    "tee": (r"[0-3]|\d+:[0-3](,\d+:[0-3])*", "have the form 0 to 3, or 0:1,1:3"),
    "main_process_ip": (r"[\w.:%-]+", "be an address or a host name"),
}


def known_keys() -> list[str]:
    """Return all top-level keys that a config file may have."""
    ours = [key.split(".")[0] for option in LAUNCH_OPTIONS for key in option.yaml]
    ours += (key for key in installed().triggers if key == key.lower())
    ours += (f"{one.name}_config" for one in installed().plugins if one.kind in WITH_SETTINGS)
    theirs = [
        "parallelism_config",
        *catalog.SECTIONS,
        *catalog.KEYS,
        *accelerate_options.OBSOLETE_KEYS,
        *accelerate_options.IGNORED_KEYS,
    ]
    return list(dict.fromkeys([*_MORE_KEYS, *ours, *theirs]))


def check_keys(config: ConfigFile) -> None:
    """Refuse unknown keys at the top of a config file and in the section `mpirun_config`.

    Obsolete keys cause a warning.

    Raises:
        ConfigurationError: a key is unknown; the text has file, line and the most similar key.
    """
    _check_environment(config)  # first, because files for a cloud have other keys
    check_known(config, list(config), known_keys())
    section = "mpirun_config"
    if config.get(section) is not None:
        check_mapping(config, section)
        known = [f"{section}.mpirun_ccl", *(name for one in LAUNCH_OPTIONS for name in one.yaml)]
        inside = [name.partition(".")[2] for name in known if name.startswith(f"{section}.")]
        check_known(config, config[section], inside, section)
    if old := [
        f"{key}: {why}" for key, why in accelerate_options.OBSOLETE_KEYS.items() if key in config
    ]:
        logger.warning("%s has obsolete keys without effect. %s", config.path, "; ".join(old))


def check_known(
    config: ConfigFile, keys: Iterable[object], known: Sequence[str], section: str = ""
) -> None:
    """Refuse keys of a section, or of the top of a file, that are not in `known`."""
    mistakes = Mistakes()
    for key in map(str, keys):
        with mistakes:
            if key not in known:
                inside, full = (f"{section} of ", f"{section}.{key}") if section else ("", key)
                raise ConfigurationError(
                    f"Unknown key {key!r} in {inside}{config.where(full)}.{did_you_mean(key, known)}"
                )
    mistakes.report()


def check_mapping(config: ConfigFile, section: str) -> None:
    """Refuse a section that is not a mapping."""
    if not isinstance(config[section], dict):
        raise ConfigurationError(
            f"{section}: {config[section]!r} ({config.where(section)}) must be a mapping of keys "
            "to values."
        )


def _check_environment(config: ConfigFile) -> None:
    said = config.get("compute_environment")
    allowed = ("LOCAL_MACHINE", "AMAZON_SAGEMAKER")
    where = config.where("compute_environment")
    if said == "AMAZON_SAGEMAKER":
        why = accelerate_options.REFUSED_OPTIONS["aws_access_key_id"]
        raise ConfigurationError(f"compute_environment: {said} ({where}). {why}")
    if said not in (None, *allowed):
        raise ConfigurationError(
            f"compute_environment: {said!r} ({where}) is not one of {listing(allowed)}."
            f"{did_you_mean(str(said), allowed)}"
        )


def backend_of(config: ConfigFile, backend: SourcedValue) -> SourcedValue:
    """Return the backend for the file's `distributed_type`, unless another setting names one.

    Raises:
        ConfigurationError: the type is unknown.
    """
    said = config.get("distributed_type")
    if said is None:
        return backend
    kind = "NO" if said is False else str(said).upper()  # YAML reads a bare NO as false
    known = ["NO", "MULTI_CPU", "MULTI_GPU", "MPS", *catalog.DISTRIBUTED_TYPES]
    where = config.where("distributed_type")
    if kind not in known and not re.fullmatch(r"MULTI_[A-Z]+", kind):
        raise ConfigurationError(
            f"distributed_type: {said!r} ({where}) is not one of {listing(known)}."
            f"{did_you_mean(kind, known)}"
        )
    if backend.value is not None or kind not in catalog.DISTRIBUTED_TYPES:
        return backend
    return SourcedValue(catalog.DISTRIBUTED_TYPES[kind], where)


def cpu_of(config: ConfigFile, cpu: SourcedValue) -> SourcedValue:
    """Return true for the file's `distributed_type: MULTI_CPU`, unless `cpu` itself is set."""
    if cpu.origin == "default" and str(config.get("distributed_type")).upper() == "MULTI_CPU":
        return SourcedValue(True, f"{FOLLOWS}{config.where('distributed_type')}")
    return cpu


def rendezvous_backends() -> list[str]:
    """Return the names that `rdzv_backend` may have."""
    return [*_RENDEZVOUS, *(one.name for one in entry_points(group="torchrun.handlers"))]


def check_formats(chosen: Mapping[str, SourcedValue]) -> None:
    """Check strings that torch would refuse or misread later."""
    backend = chosen["rdzv_backend"]
    if backend.value not in _RENDEZVOUS:  # only then, look through all distributions
        known = rendezvous_backends()
        if backend.value not in known:
            raise ConfigurationError(
                f"rdzv_backend={backend} is not one of {listing(known)}."
                f"{did_you_mean(str(backend.value), known)}"
            )
    for name, (pattern, form) in FORMS.items():
        said = chosen[name]
        if said.value is not None and not re.fullmatch(pattern, str(said.value)):
            raise ConfigurationError(f"{name}={said} must {form}.")
    interval = chosen["monitor_interval"]
    if not 0 < interval.value < 3600:
        raise ConfigurationError(
            f"monitor_interval={interval} must be a positive number of seconds."
        )


def split_range(chosen: dict[str, SourcedValue]) -> None:
    """Replace a range of machines by its two numbers.

    Raises:
        ConfigurationError: it is neither a number nor a range.
    """
    said = chosen["num_machines"]
    least, most = machine_range(said)
    elastic = ":" in str(said.value)
    chosen["num_machines"] = SourcedValue(most, said.origin)
    chosen["min_machines"] = SourcedValue(least if elastic else None, said.origin)
    if elastic and chosen["rdzv_backend"].origin == "default":
        chosen["rdzv_backend"] = SourcedValue("c10d", "num_machines is a range")


def processes(
    chosen: Mapping[str, SourcedValue], environ: Mapping[str, str], around: ClusterEnvironment
) -> SourcedValue:
    """Return the number of processes on all machines together, and where it came from."""
    said = chosen["num_processes"]
    machines = chosen["num_machines"].value
    if around.ranks and said.value != int(around.ranks["WORLD_SIZE"]):
        raise ConfigurationError(
            f"num_processes={said} contradicts {around.values['num_processes'].origin}, which has "
            "already started the ranks. Leave num_processes out."
        )
    on_cpu = parse_bool(chosen["cpu"].value)
    ids = gpu_ids(chosen["gpu_ids"])
    if chosen["multi_gpu"].value and on_cpu:
        raise ConfigurationError(
            f"--multi_gpu contradicts running on the CPU ({chosen['cpu'].origin})."
        )
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
                f"num_processes={said} is not divisible by num_machines={machines}. num_processes "
                "counts the processes on all machines together."
            )
        return said
    if on_cpu:
        return SourcedValue(machines, f"one per machine, because of {chosen['cpu'].origin}")
    if ids:
        return SourcedValue(
            len(ids) * machines, f"accelerators in gpu_ids, {chosen['gpu_ids'].origin}"
        )
    visible = devices.count_accelerators(environ)
    if visible:
        return SourcedValue(visible * machines, f"{visible} {COUNTED[1]}")
    return SourcedValue(machines, COUNTED[0])


def gpu_ids(sourced: SourcedValue) -> list[str]:
    """Return the indices of the devices to use; empty means all."""
    if sourced.value is None or str(sourced.value).lower() == "all":
        return []
    ids = [part.strip() for part in str(sourced.value).split(",") if part.strip()]
    if len(set(ids)) != len(ids) or not all(part.isdigit() for part in ids):
        raise ConfigurationError(
            f"gpu_ids={sourced} must be distinct numbers joined by commas, such as 0,2, or 'all'."
        )
    return ids


def check_machines(chosen: Mapping[str, SourcedValue], around: ClusterEnvironment) -> None:
    """Check the options for processes and machines against each other."""
    launcher, processes = chosen["launcher"], chosen["num_processes"]
    _check_elastic(chosen, around)
    if around.ranks:
        if launcher.value == "torchrun" and int(around.ranks["WORLD_SIZE"]) > 1:
            raise ConfigurationError(
                f"launcher={launcher} cannot be used here: {around.ranks['WORLD_SIZE']} ranks are "
                "already running, and each of them would start a separate run. Leave it out."
            )
        return
    if launcher.value == "simple" and processes.value > 1:
        raise ConfigurationError(
            f"launcher={launcher} starts one process, but num_processes={processes}. Leave the "
            "launcher out, or use torchrun."
        )
    rank, machines, address = (
        chosen[name] for name in ("machine_rank", "num_machines", "main_process_ip")
    )
    if rank.value >= machines.value:
        raise ConfigurationError(f"machine_rank={rank} must be less than num_machines={machines}.")
    if machines.value > 1 and not address.value and launcher.value in _NEEDS_ADDRESS:
        raise ConfigurationError(
            f"num_machines={machines.value} needs --main_process_ip, the address of machine 0."
        )
    alone = machines.value == 1 and processes.value > 1
    if alone and address.value and not is_here(str(address.value)):
        raise ConfigurationError(
            f"main_process_ip={address} is not an address of this machine, and num_machines is 1. "
            "Leave main_process_ip out, or set --num_machines."
        )


def _check_elastic(chosen: Mapping[str, SourcedValue], around: ClusterEnvironment) -> None:
    """Refuse a range of machines where their number can't change, and a policy without a range."""
    least, machines = chosen["min_machines"], chosen["num_machines"]
    if least.value is None:
        policy = chosen["elastic_policy"]
        if policy.value == "scale":
            raise ConfigurationError(
                f"elastic_policy={policy} has no effect, because num_machines={machines} is a fixed "
                "number. Set a range with --num_machines MIN:MAX, or leave elastic_policy out."
            )
        return
    said = f"num_machines={SourcedValue(f'{least.value}:{machines.value}', machines.origin)}"
    if around.ranks:
        raise ConfigurationError(
            f"{said} lets machines leave and join, but {around.values['num_processes'].origin}, which "
            "has already started a fixed number of ranks. Set one number."
        )
    if chosen["rdzv_backend"].value == "static":
        raise ConfigurationError(
            f"{said} needs a rendezvous that machines can leave and join, but "
            f"rdzv_backend={chosen['rdzv_backend']}. Leave it out, or set it to c10d."
        )
    if chosen["launcher"].value not in (None, "torchrun", "srun", "ray"):
        raise ConfigurationError(
            f"{said} needs the launcher torchrun, srun or ray, but launcher={chosen['launcher']}. "
            "Set one number."
        )


def check_port(plan: LaunchPlan) -> None:
    """Refuse a port that is already in use on this machine."""
    port = plan.main_process_port
    alone = plan.num_machines == 1
    several = plan.num_processes > 1 and "RANK" not in plan.environment
    if port and several and alone and devices.is_port_in_use(port):
        raise ConfigurationError(
            f"Port {port} ({plan.provenance['main_process_port'].origin}) is in use on this machine. "
            "Choose another port, or leave it out to use a free one."
        )
