"""Decide what a launch does, from command line, environment and config file, and say why."""

from __future__ import annotations

import difflib
import logging
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate_core.configuration.files import (
    CONFIG_VARIABLE,
    ConfigFile,
    default_config_path,
    read_config,
)
from accelerate_core.configuration.provenance import BECAUSE_VARIABLE, Because, encode
from accelerate_core.errors import ConfigurationError, did_you_mean, listing
from accelerate_core.launch import devices
from accelerate_core.launch.options import LAUNCH_OPTIONS, LaunchOption, known_yaml_keys
from accelerate_core.launch.plan import LaunchPlan
from accelerate_core.launch.start import LAUNCHERS
from accelerate_core.launch.target import find_target

__all__ = ["find_config", "make_plan", "refuse_nesting"]

_SWITCHES = {
    **dict.fromkeys(("yes", "true", "on", "1"), True),
    **dict.fromkeys(("no", "false", "off", "0"), False),
}
logger = logging.getLogger(__name__)

_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE")

_THREADS = "OMP_NUM_THREADS"


def make_plan(
    script: str,
    arguments: Sequence[str],
    given: Mapping[str, Any],
    environ: Mapping[str, str],
    config: ConfigFile | None = None,
) -> LaunchPlan:
    """Decide everything about a launch; nothing is started and nothing is written.

    Args:
        given: options from the command line; `None` stands for not given.
        environ: the environment of the launcher, a source of values.

    Raises:
        ConfigurationError: a value is wrong, two contradict each other, the target
            does not exist, or this process is already a rank of a launch.
    """
    if config is not None:
        _check_keys(config)
    chosen = {option.name: _choose(option, given, environ, config) for option in LAUNCH_OPTIONS}
    value = {name: because.value for name, because in chosen.items()}
    refuse_nesting(environ, value["num_machines"])
    target = find_target(
        script,
        arguments,
        environ,
        module=bool(value["module"]),
        no_python=bool(value["no_python"]),
    )
    if config is not None:
        chosen["backend"] = _backend_of(config, chosen["backend"])
    _check_names(chosen)
    chosen["num_processes"] = _processes(chosen, environ)
    _check_machines(chosen)
    value = {name: because.value for name, because in chosen.items()}
    per_machine = value["num_processes"] // value["num_machines"]
    chosen[_THREADS] = _threads(given, environ, per_machine)
    return LaunchPlan(
        target=target,
        num_processes=value["num_processes"],
        num_machines=value["num_machines"],
        machine_rank=value["machine_rank"],
        launcher=value["launcher"],
        main_process_ip=value["main_process_ip"],
        main_process_port=value["main_process_port"] or None,
        rdzv_backend=value["rdzv_backend"],
        rdzv_conf=value["rdzv_conf"] or "",
        max_restarts=value["max_restarts"],
        monitor_interval=value["monitor_interval"],
        log_dir=value["log_dir"],
        tee=value["tee"],
        role=value["role"],
        quiet=bool(value["quiet"]),
        environment=_environment(chosen, environ, config),
        because=chosen,
    )


def find_config(named: str | None, environ: Mapping[str, str]) -> ConfigFile | None:
    """Return the config file: the one named, the environment's, else the default if it exists."""
    if named is not None:
        return read_config(named)
    if environ.get(CONFIG_VARIABLE):
        return read_config(environ[CONFIG_VARIABLE])
    default = default_config_path(environ)
    if default.is_file():
        return read_config(default)
    theirs = _peers_config(environ)
    if theirs.is_file():
        logger.warning(
            "There is a configuration made for another tool, %s, and none of ours. It is not used: "
            "name it with --config_file to use it as it is.",
            theirs,
        )
    return None


def _peers_config(environ: Mapping[str, str]) -> Path:
    """Return where the tool whose files we read keeps its default configuration."""
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(environ.get("HF_HOME") or cache / "huggingface") / "accelerate/default_config.yaml"


def refuse_nesting(environ: Mapping[str, str], num_machines: int = 1) -> None:
    """Raise ConfigurationError if this process is already one rank of many."""
    outer = ""
    if "TORCHELASTIC_RUN_ID" in environ or ("WORLD_SIZE" in environ and "LOCAL_RANK" in environ):
        outer = f"rank {environ.get('RANK', '?')} of {environ.get('WORLD_SIZE', '?')} of a launch"
    for name in _MPI_SIZES:
        if environ.get(name, "1") != "1":
            outer = f"one of {environ[name]} processes of an MPI run ({name})"
    # Schedulers of containers set WORLD_SIZE to the number of machines, for the launcher to read.
    if not outer and "WORLD_SIZE" in environ and num_machines == 1:
        outer = f"part of a world of {environ['WORLD_SIZE']} (environment variable WORLD_SIZE)"
    if outer:
        raise ConfigurationError(
            f"This process is already {outer}; a launch inside a launch would start processes "
            "that wait for each other. Run the script itself with python here, or unset the "
            "variables RANK, WORLD_SIZE and LOCAL_RANK."
        )


def _choose(
    option: LaunchOption,
    given: Mapping[str, Any],
    environ: Mapping[str, str],
    config: ConfigFile | None,
) -> Because:
    if given.get(option.name) is not None:
        return Because(given[option.name], f"command line --{option.name}")
    if option.env and environ.get(option.env):
        return Because(environ[option.env], f"environment variable {option.env}")
    for key in option.yaml if config is not None else ():
        if config is not None and config.get(key) is not None:
            where = config.where(key)
            return Because(_from_file(option, key, config[key], where), where)
    return Because(option.default, "default")


def _from_file(option: LaunchOption, key: str, value: Any, where: str) -> Any:
    """Convert a value of the config file, naming file and line if it does not fit."""
    wrong = f"{key}: {value!r} ({where})"
    if option.kind is bool:
        switch = _SWITCHES.get(str(value).lower())
        if switch is None:
            raise ConfigurationError(f"{wrong} is not a switch; allowed are {listing(_SWITCHES)}.")
        return switch
    if isinstance(value, bool | dict | list):
        raise ConfigurationError(f"{wrong} must be a {option.kind.__name__}.")
    try:
        made = option.kind(value)
    except (TypeError, ValueError):
        raise ConfigurationError(f"{wrong} must be a {option.kind.__name__}.") from None
    if option.minimum is not None and made < option.minimum:
        raise ConfigurationError(f"{wrong} must be at least {option.minimum}.")
    return made


def _check_keys(config: ConfigFile) -> None:
    """Refuse a key that is nearly a known one; keys of plugins are checked by them."""
    known = list(known_yaml_keys())
    for key in config:
        if key not in known and difflib.get_close_matches(str(key), known, n=1, cutoff=0.85):
            hint = did_you_mean(str(key), known)
            raise ConfigurationError(f"Unknown key {str(key)!r} in {config.where(str(key))}.{hint}")


def _backend_of(config: ConfigFile, backend: Because) -> Because:
    """Take the backend that a file's `distributed_type` asks for, unless one is named."""
    from accelerate_core.plugins import catalog

    kind = str(config.get("distributed_type", "")).upper()
    if backend.value is not None or kind not in catalog.DISTRIBUTED_TYPES:
        return backend
    return Because(catalog.DISTRIBUTED_TYPES[kind], config.where("distributed_type"))


def _check_names(chosen: Mapping[str, Because]) -> None:
    """Check the names of plugins against what the installed packages declare."""
    kinds = {"mixed_precision": "precision", "backend": "backend", "launcher": "launcher"}
    for option, kind in kinds.items():
        because = chosen[option]
        if because.value is None or because.origin == "default" or because.value in LAUNCHERS:
            continue
        from accelerate_core.plugins import find

        find(kind, str(because.value).lower(), because=because.origin)


def _processes(chosen: Mapping[str, Because], environ: Mapping[str, str]) -> Because:
    said, machines = chosen["num_processes"], chosen["num_machines"].value
    on_cpu = _on(chosen["cpu"].value)
    if chosen["multi_gpu"].value and on_cpu:
        raise ConfigurationError(
            f"--multi_gpu contradicts running on the CPU ({chosen['cpu'].origin})."
        )
    ids = _gpu_ids(chosen["gpu_ids"])
    if chosen["multi_gpu"].value and not ids and devices.count_accelerators(environ) == 0:
        raise ConfigurationError(
            "--multi_gpu was given, but torch sees no accelerator on this machine. For several "
            "processes on the CPU use --cpu --num_processes N."
        )
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
    return value is True or _SWITCHES.get(str(value).lower(), False)


def _gpu_ids(because: Because) -> list[str]:
    if because.value is None or str(because.value).lower() == "all":
        return []
    ids = [part.strip() for part in str(because.value).split(",") if part.strip()]
    if len(set(ids)) != len(ids) or not all(part.isdigit() for part in ids):
        raise ConfigurationError(
            f"gpu_ids={because.value!r} ({because.origin}) must be different numbers joined by "
            "commas, such as 0,2, or 'all'."
        )
    return ids


def _check_machines(chosen: Mapping[str, Because]) -> None:
    value = {name: because.value for name, because in chosen.items()}
    machines, rank = value["num_machines"], value["machine_rank"]
    if rank >= machines:
        raise ConfigurationError(
            f"machine_rank={rank} ({chosen['machine_rank'].origin}) must be less than "
            f"num_machines={machines} ({chosen['num_machines'].origin})."
        )
    if machines > 1 and not value["main_process_ip"]:
        raise ConfigurationError(
            f"num_machines={machines} needs --main_process_ip: the address of machine 0."
        )
    port, several = value["main_process_port"], value["num_processes"] > 1
    if port and port > 65535:
        raise ConfigurationError(
            f"main_process_port={port} ({chosen['main_process_port'].origin}) must be below 65536."
        )
    if port and several and rank == 0 and machines == 1 and _in_use(port):
        raise ConfigurationError(
            f"Port {port} ({chosen['main_process_port'].origin}) is in use on this machine. "
            "Choose another, or leave it out and a free one is taken."
        )


def _in_use(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _threads(given: Mapping[str, Any], environ: Mapping[str, str], processes: int) -> Because:
    if given.get("num_cpu_threads_per_process") is not None:
        origin = "command line --num_cpu_threads_per_process"
        return Because(given["num_cpu_threads_per_process"], origin)
    if environ.get(_THREADS):
        return Because(None, f"environment variable {_THREADS} stands")
    if processes == 1:
        return Because(None, "one process: torch decides")
    return Because(devices.threads_for(processes), f"cores shared by {processes} processes")


def _environment(
    chosen: Mapping[str, Because], environ: Mapping[str, str], config: ConfigFile | None
) -> dict[str, str]:
    """Return what children get on top of the launcher's environment."""
    made: dict[str, str] = {}
    origins: dict[str, str] = {}
    for option in LAUNCH_OPTIONS:
        because = chosen[option.name]
        if option.env and option.env != _THREADS and because.origin.startswith("command line"):
            made[option.env] = _text(because.value)
            origins[option.env] = because.origin
    if chosen[_THREADS].value is not None:
        made[_THREADS] = str(chosen[_THREADS].value)
    if ids := _gpu_ids(chosen["gpu_ids"]):
        made[devices.visible_devices_variable()] = ",".join(ids)
    if config is not None:
        made[CONFIG_VARIABLE] = str(Path(config.path).resolve())
    if origins:
        made[BECAUSE_VARIABLE] = encode(origins)
    return made


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
