"""Decide every value of a launch from the command line, the environment and the config file."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from accelerate_core.booleans import require_bool
from accelerate_core.config.core import CORE_SETTINGS
from accelerate_core.config.files import CONFIG_VARIABLE
from accelerate_core.config.lookup import look_up
from accelerate_core.config.provenance import PROVENANCE_VARIABLE
from accelerate_core.plugin import (
    ConfigFile,
    ConfigurationError,
    Mistakes,
    SettingField,
    SourcedValue,
    Sources,
    find,
    installed,
    parse_bool,
    read_config,
)
from accelerate_core.plugins import catalog
from accelerate_core.plugins.factory import PARTS
from accelerate_launch import checks, devices, mpi
from accelerate_launch.cluster import ClusterEnvironment, detect_cluster
from accelerate_launch.contributed import MESH, check_sections, set_in_environment, take
from accelerate_launch.options import LAUNCH_OPTIONS, NAMES_PLUGIN, OWN
from accelerate_launch.paths import accelerate_config_path, default_config_path
from accelerate_launch.plan import LaunchPlan, Target, machine_range
from accelerate_launch.schemas import plugin_schemas
from accelerate_launch.target import find_target, make_target

logger = logging.getLogger(__name__)

_THREADS = "OMP_NUM_THREADS"


def make_plan(
    script: str,
    arguments: Sequence[str],
    given: Mapping[str, Any],
    environ: Mapping[str, str],
    config: ConfigFile | None = None,
) -> LaunchPlan:
    """Decide everything about a launch. Nothing is started and nothing is written.

    Args:
        given: options from the command line; `None` means not given.
        environ: the environment of the launcher, which may set values.
        script: the script, module or program to run.
        arguments: the arguments of the script.

    Raises:
        ConfigurationError: a value is invalid, two values contradict each other, the script does not
            exist, or this process is already a rank of a launch.
    """
    plan = draft_plan(given, environ, config)
    flags = {name: bool(plan.provenance[name].value) for name in ("module", "no_python")}
    if _starts_elsewhere(plan):
        return replace(plan, target=make_target(script, arguments, **flags))
    plan = replace(plan, target=find_target(script, arguments, environ, **flags))
    checks.check_port(plan)
    if plan.num_machines > 1 and plan.launcher in (None, "torchrun"):
        return _with_address(plan, environ)
    return plan


def _starts_elsewhere(plan: LaunchPlan) -> bool:
    """Return whether a launcher was named that starts no process on this machine."""
    if plan.launcher is None:
        return False
    launcher = find("launcher", plan.launcher, source=plan.provenance["launcher"].origin)
    return bool(getattr(launcher.load(), "elsewhere", False))


def _with_address(plan: LaunchPlan, environ: Mapping[str, str]) -> LaunchPlan:
    """Add the address and the network interface at which the other machines reach this one."""
    host = str(plan.main_process_ip)
    address = devices.local_address(host, plan.main_process_port)
    if address is None:
        return plan
    here = devices.is_address_of(address, host)
    if ip_address(address).is_loopback and not here:
        return plan  # Debian's hosts file maps a machine's own name to 127.0.1.1
    conf = plan.rdzv_conf
    environment = dict(plan.environment)
    if plan.rdzv_backend == "c10d" and "is_host=" not in conf:
        # Says whether the store is on this machine. torch itself would ask a name service.
        conf = ",".join(filter(None, (conf, f"is_host={str(here).lower()}")))
    if "GLOO_SOCKET_IFNAME" not in environ:
        interface = devices.interface_of(address)
        if interface:
            environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    return replace(plan, local_addr=address, rdzv_conf=conf, environment=environment)


def draft_plan(
    given: Mapping[str, Any], environ: Mapping[str, str], config: ConfigFile | None = None
) -> LaunchPlan:
    """Make the same plan as `make_plan`, but without a script and without checking ports.

    Raises:
        ConfigurationError: as for `make_plan`.
    """
    made = decide(given, environ, config)
    chosen = made.chosen
    if not made.around.ranks:
        # Kubeflow's operator sets WORLD_SIZE in its pods, even if there is only one.
        environ_of_rank = {} if made.around.name == "Kubernetes" else environ
        _refuse_rank(environ_of_rank, chosen["num_machines"].value)
    same = {field.name for field in fields(LaunchPlan)} & chosen.keys()
    values = {name: chosen[name].value for name in same}
    values |= {
        "main_process_port": chosen["main_process_port"].value or None,
        "rdzv_conf": chosen["rdzv_conf"].value or "",
        "quiet": bool(chosen["quiet"].value),
    }
    return LaunchPlan(
        Target("SCRIPT"),
        environment=_environment(made, config),
        contributed={**made.contributed, **made.plugins},
        provenance={**chosen, **made.plugins},
        **values,
    )


@dataclass(frozen=True)
class Decision:
    """Every option of a launch with its value, independent of the script.

    Attributes:
        plugins: the variables that command-line options of plugins set.
        contributed: the settings of plugins from variables and the config file.
    """

    chosen: Mapping[str, SourcedValue]
    plugins: Mapping[str, SourcedValue]
    contributed: Mapping[str, SourcedValue]
    around: ClusterEnvironment


def decide(
    given: Mapping[str, Any], environ: Mapping[str, str], config: ConfigFile | None = None
) -> Decision:
    """Choose the value of every option and check them against each other.

    Raises:
        ConfigurationError: a value is invalid, or two values contradict each other.
    """
    contributed: dict[str, SourcedValue] = {}
    mistakes = Mistakes()
    if config is not None:
        with mistakes:
            checks.check_keys(config)
        with mistakes:
            contributed |= check_sections(config, environ)
    # Environment variables take precedence over the file.
    contributed |= set_in_environment(contributed, environ)
    contributed |= asks_launchers(environ)
    sources = Sources(environ, config)
    around = _used_cluster(detect_cluster(environ), given, sources)
    chosen = {}
    for option in LAUNCH_OPTIONS:
        with mistakes:
            chosen[option.name] = _choose(option, given, sources, around)
    with mistakes:
        if "num_machines" in chosen and "rdzv_backend" in chosen:
            checks.split_range(chosen)
    with mistakes:
        if "mixed_precision" in chosen:
            _check_plugin(chosen, "mixed_precision")
    if mistakes.found and "backend" in chosen:
        with mistakes:  # it is also checked below, but all mistakes belong in one message
            _check_plugin(chosen, "backend")
    if mistakes.found:  # also report settings that otherwise only the ranks would check
        for field in CORE_SETTINGS:
            if field.name in PARTS:
                with mistakes:
                    _check_plugin({field.name: look_up(field, sources)}, field.name, field.name)
    mistakes.report()
    if config is not None:
        chosen["backend"] = checks.backend_of(config, chosen["backend"])
        typed = chosen["backend"]
        if "distributed_type" in config and typed.origin == config.where("distributed_type"):
            contributed |= {name: SourcedValue("true", typed.origin) for name in _asking_for(typed)}
        chosen["cpu"] = checks.cpu_of(config, chosen["cpu"])
    plugins, backend = take(given, chosen["backend"], chosen["mixed_precision"], environ)
    chosen["backend"] = backend
    for name in NAMES_PLUGIN:
        _check_plugin(chosen, name)
    if config is not None:
        _refuse_contradictions(chosen, contributed, config, environ)
    _take_hosts(chosen)
    chosen["num_processes"] = checks.processes(chosen, environ, around)
    checks.check_machines(chosen, around)
    checks.check_formats(chosen)
    ours = chosen["num_processes"].value // chosen["num_machines"].value
    if around.ranks:
        ours = int(around.ranks["LOCAL_WORLD_SIZE"])
    chosen[_THREADS] = _threads(given, environ, ours)
    return Decision(chosen, plugins, contributed, around)


def _check_plugin(chosen: Mapping[str, SourcedValue], name: str, kind: str | None = None) -> None:
    """Raise an error if an option names a plugin that is not installed."""
    sourced = chosen[name]
    if sourced.value is not None and sourced.origin != "default":
        find(kind or NAMES_PLUGIN[name], str(sourced.value).lower(), source=sourced.origin)


def _refuse_contradictions(
    chosen: Mapping[str, SourcedValue],
    contributed: Mapping[str, SourcedValue],
    config: ConfigFile,
    environ: Mapping[str, str],
) -> None:
    """Refuse a file that sets an option twice: at its top, and in the section of the backend in use."""
    for option in LAUNCH_OPTIONS:
        ours = chosen[option.name]
        theirs = next((contributed[env] for env in option.env if env in contributed), ours)
        same = str(theirs.value) in ("auto", str(ours.value))
        if same or not all(one.origin.startswith(str(config.path)) for one in (ours, theirs)):
            continue
        owners = [
            schema.name
            for schema in plugin_schemas(environ)
            if config.get(schema.section) and any(f.env[:1] == option.env for f in schema.fields)
        ]
        if chosen["backend"].value in owners:
            raise ConfigurationError(
                f"{option.name}={ours.value} (from {ours.origin}) contradicts {theirs.value} (from "
                f"{theirs.origin}), in the section of "
                f"the backend {chosen['backend'].value!r}. Remove one of them."
            )


def find_config(named: str | None, environ: Mapping[str, str]) -> ConfigFile | None:
    """Return the named config file, else the environment's, else the default one if it exists."""
    if named is not None:
        return read_config(named)
    if environ.get(CONFIG_VARIABLE):
        return read_config(environ[CONFIG_VARIABLE])
    default = default_config_path(environ)
    if default.is_file():
        return read_config(default)
    theirs = accelerate_config_path(environ)
    if theirs.is_file():
        logger.warning(
            "Found a config file of Hugging Face Accelerate, %s, but none of accelerate-core. It is "
            "not used. Run accelerate-core config import once, or pass it as --config_file.",
            theirs,
        )
    return None


def refuse_nesting(environ: Mapping[str, str]) -> None:
    """Raise ConfigurationError if this process is already one of several ranks."""
    for name in (flavour.ranks[1] for flavour in mpi.FLAVOURS):
        if environ.get(name, "1") != "1":
            raise _nested(f"one of {environ[name]} processes of an MPI run ({name})")
    _refuse_rank(environ, 1)


def _refuse_rank(environ: Mapping[str, str], num_machines: int) -> None:
    if "TORCHELASTIC_RUN_ID" in environ or {"WORLD_SIZE", "LOCAL_RANK"} <= environ.keys():
        rank, size = environ.get("RANK", "?"), environ.get("WORLD_SIZE", "?")
        raise _nested(f"rank {rank} of {size} of a launch")
    # Container schedulers set WORLD_SIZE to the number of machines, which the launcher reads.
    if "WORLD_SIZE" in environ and num_machines == 1:
        size = environ["WORLD_SIZE"]
        raise _nested(f"part of a world of {size} (environment variable WORLD_SIZE)")


def _nested(outer: str) -> ConfigurationError:
    return ConfigurationError(
        f"This process is already {outer}. Another launch inside it would start processes that wait "
        "for each other forever. Run the script with python instead, or unset the environment "
        "variables RANK, WORLD_SIZE and LOCAL_RANK."
    )


def _choose(
    option: SettingField, given: Mapping[str, Any], sources: Sources, around: ClusterEnvironment
) -> SourcedValue:
    if given.get(option.name) is not None:
        return SourcedValue(given[option.name], f"command line --{option.name}")
    return look_up(option, sources, detected=around.values)


def _used_cluster(
    around: ClusterEnvironment, given: Mapping[str, Any], sources: Sources
) -> ClusterEnvironment:
    """Ignore the scheduler's allocation if `num_machines` is set to another number.

    A range that ends with the number of its machines still uses the allocation.
    """
    if around.ranks or "num_machines" not in around.values:
        return around
    option = next(one for one in LAUNCH_OPTIONS if one.name == "num_machines")
    said = _choose(option, given, sources, around)
    found = around.values["num_machines"]
    if machine_range(said)[1] == machine_range(found)[1]:
        return around
    logger.warning(
        "num_machines=%s (%s) overrides %s, which has %s.",
        *(said.value, said.origin, found.origin, found.value),
    )
    return ClusterEnvironment()


def asks_launchers(environ: Mapping[str, str]) -> dict[str, SourcedValue]:
    """Return the environment variables that request a launcher plugin; a false value does not.

    Raises:
        ConfigurationError: a variable `ACCELERATE_USE_...` is not a boolean.
    """
    triggers = (record.triggers for record in installed().of_kind("launcher"))
    found = set_in_environment(set().union(*triggers), environ)
    for name, value in found.items():
        if name.startswith("ACCELERATE_USE_"):
            require_bool(value.value, f"Environment variable {name}={value.value!r}")
    return {name: one for name, one in found.items() if parse_bool(one.value) is not False}


def _take_hosts(chosen: dict[str, SourcedValue]) -> None:
    """Read the number of machines and the host of rank 0 from an MPI host file."""
    file = chosen["mpirun_hostfile"]
    if file.value is None or chosen["launcher"].value not in (None, "mpirun"):
        return
    hosts = mpi.hosts_of(str(file.value))
    if chosen["launcher"].value is None:
        chosen["launcher"] = SourcedValue("mpirun", file.origin)
    if chosen["num_machines"].origin == "default":
        chosen["num_machines"] = SourcedValue(len(hosts), f"hosts in {file.value}")
    if chosen["main_process_ip"].value is None and len(hosts) > 1:
        chosen["main_process_ip"] = SourcedValue(hosts[0], f"first host in {file.value}")


def _threads(given: Mapping[str, Any], environ: Mapping[str, str], processes: int) -> SourcedValue:
    if given.get("num_cpu_threads_per_process") is not None:
        origin = "command line --num_cpu_threads_per_process"
        return SourcedValue(given["num_cpu_threads_per_process"], origin)
    if environ.get(_THREADS):
        return SourcedValue(None, f"environment variable {_THREADS} is already set")
    if processes == 1:
        return SourcedValue(None, "one process: torch decides")
    return SourcedValue(devices.threads_for(processes), f"cores shared by {processes} processes")


def _environment(decision: Decision, config: ConfigFile | None) -> dict[str, str]:
    """Return the variables that are added to the environment of the processes.

    They include the values of the config file, because libraries read variables and not the file.
    """
    chosen = decision.chosen
    ours = ("command line", checks.FOLLOWS, *([str(config.path)] if config is not None else []))
    made = {}
    for option in LAUNCH_OPTIONS:
        sourced = chosen[option.name]
        if not option.env or sourced.value is None:
            continue
        if sourced.origin.startswith(ours) or (option.name in OWN and sourced.value):
            made[option.env[0]] = sourced
    # A plugin's section doesn't set a core option for all plugins. The ranks compare both.
    core = {name for option in LAUNCH_OPTIONS for name in option.env}
    for name, sourced in decision.contributed.items():
        if (
            name not in core
            and sourced.origin.startswith(ours)
            and isinstance(sourced.value, (str, int, float))
        ):
            made[name] = sourced
    backend = chosen["backend"]
    if backend.origin.startswith(ours):
        made |= {name: SourcedValue("true", backend.origin) for name in _asking_for(backend)}
    made.update(decision.plugins)
    texts = {env: _text(sourced.value) for env, sourced in made.items()}
    if chosen[_THREADS].value is not None:
        texts[_THREADS] = str(chosen[_THREADS].value)
    if ids := checks.gpu_ids(chosen["gpu_ids"]):
        texts[devices.visible_devices_variable()] = ",".join(ids)
    if config is not None:
        texts[CONFIG_VARIABLE] = str(Path(config.path).resolve())
    if made:
        origins = {env: sourced.origin for env, sourced in made.items()}
        texts[PROVENANCE_VARIABLE] = json.dumps(origins, sort_keys=True)
    return {**texts, **decision.around.ranks}


def _asking_for(backend: SourcedValue) -> list[str]:
    """Return the environment variables that request a backend and the parts that come with it."""
    return [n for n, extra in catalog.VARIABLES.items() if extra == backend.value and n != MESH]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
