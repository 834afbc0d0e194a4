"""Decide everything about a job from a launch plan and the launcher's settings."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from accelerate_core.plugin import ConfigurationError
from accelerate_kubernetes.settings import KubernetesLaunch
from accelerate_launch import LaunchPlan

T = TypeVar("T")

#: The port of machine 0 in the pods.
DEFAULT_PORT = 29500
#: Where the config file is in the pods.
CONFIG_FILE = "/etc/accelerate-core/config.yaml"
#: The seconds that a run has to save after SIGTERM.
SAVING = 300

_CONFIG_VARIABLE = "ACCELERATE_CONFIG_FILE"
#: Where the values of other variables came from, as JSON.
_ORIGINS = "ACCELERATE_PROVENANCE"
_OWN_VARIABLES = "ACCELERATE_KUBERNETES_"
#: Kubernetes limits host names to 63 characters, and the operators append to the name of the job.
_LONGEST_NAME = 45
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?")
#: The key of a label, without the limits on its length.
_LABEL = re.compile(r"([a-z0-9][-a-z0-9.]*/)?[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?")
#: The operators or the launcher in the pod set these variables.
_RANKS = frozenset(
    {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
)
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
#: The options of `launch` that the launcher in a pod must see on its command line. Other settings
#: reach it as environment variables or in the config file.
_FORWARDED = (
    "num_cpu_threads_per_process",
    "max_restarts",
    "monitor_interval",
    "role",
    "rdzv_backend",
    "rdzv_conf",
    "rdzv_id",
    "log_dir",
    "tee",
)
_FLAGS = ("module", "no_python", "quiet")
#: Keys of a config file that concern this machine, or that are on the command line of the pods.
_NOT_IN_PODS = frozenset(
    {
        *_FORWARDED,
        "num_processes",
        "num_machines",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "launcher",
        "gpu_ids",
        "kubernetes_config",
        "mpirun_config",
    }
)


@dataclass(frozen=True)
class Job:
    """A job, with every value decided.

    Attributes:
        command: the command of each pod.
        environment: variables with a value.
        secret_variables: variable -> (secret, key).
        secrets: secrets that provide a variable for each of their keys.
        shm_size: the limit of /dev/shm; "" for as much as the pod's memory, None for no volume.
        volumes: (claim, path, read only).
        config: the text of the config file in the pods; "" for none.
        grace_period: None for the cluster's default.
    """

    name: str
    kind: str
    image: str
    command: tuple[str, ...]
    machines: int = 1
    per_machine: int = 1
    port: int = DEFAULT_PORT
    namespace: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    secret_variables: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    pull_secrets: tuple[str, ...] = ()
    resources: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, str], ...] = ()
    volumes: tuple[tuple[str, str, bool], ...] = ()
    shm_size: str | None = ""
    working_dir: str | None = None
    service_account: str | None = None
    priority_class: str | None = None
    queue: str | None = None
    restarts: int = 0
    grace_period: int | None = None
    config: str = ""


def describe(plan: LaunchPlan, chosen: KubernetesLaunch) -> Job:
    """Return the job for a plan.

    Raises:
        ConfigurationError: a setting is missing or invalid. The text names the option.
    """
    if not chosen.image:
        raise ConfigurationError(
            "--launcher kubernetes needs a container image with the script and accelerate-core. Set "
            "--kubernetes_image, ACCELERATE_KUBERNETES_IMAGE, or image in the section "
            "kubernetes_config of a config file."
        )
    if chosen.kind == "job" and chosen.restarts:
        raise ConfigurationError(
            f"--kubernetes_restarts {chosen.restarts} does not work with --kubernetes_kind job, because "
            "a plain Job restarts pods one by one, and the others would wait for them. Use "
            "--kubernetes_kind jobset, or restart the processes in the pods with --max_restarts."
        )
    _refuse_local_values(plan)
    resources = _unique("resources", _each(chosen.resources, "resources", _resource))
    per_machine = _per_machine(plan, resources)
    shm_size = _shm_size(chosen.shm_size)
    volumes = _each(chosen.volumes, "volumes", _volume)
    mounted = [(path, claim) for claim, path, _ in volumes]
    _unique(
        "volumes",
        mounted if shm_size is None else [*mounted, ("/dev/shm", "--kubernetes_shm_size")],
    )
    config = _config(plan)
    own, secrets = _secrets(chosen)
    environment = {**_settings(plan), **dict(_each(chosen.env, "env", _variable))}
    if config:
        environment[_CONFIG_VARIABLE] = CONFIG_FILE
    return Job(
        name=_name(plan, chosen),
        kind=chosen.kind,
        image=chosen.image,
        command=_command(plan, per_machine),
        machines=plan.num_machines,
        per_machine=per_machine,
        port=plan.main_process_port or DEFAULT_PORT,
        namespace=chosen.namespace,
        environment=environment,
        secret_variables=own,
        secrets=secrets,
        pull_secrets=tuple(chosen.pull_secrets or ()),
        resources=resources,
        node_selector=dict(_each(chosen.node_selector, "node_selector", _label)),
        tolerations=tuple(_each(chosen.tolerations, "tolerations", _toleration)),
        volumes=tuple(volumes),
        shm_size=shm_size,
        working_dir=chosen.working_dir,
        service_account=chosen.service_account,
        priority_class=chosen.priority_class,
        queue=chosen.queue,
        restarts=chosen.restarts,
        grace_period=_grace_period(plan, chosen),
        config=config,
    )


def _refuse_local_values(plan: LaunchPlan) -> None:
    """Refuse options that the cluster decides."""
    for name, instead in (
        ("main_process_ip", "The pods find machine 0 by the name of its pod."),
        ("machine_rank", "The cluster numbers the pods."),
        ("gpu_ids", "Request accelerators with --kubernetes_resources nvidia.com/gpu=N."),
    ):
        sourced = plan.provenance.get(name)
        if sourced is not None and sourced.origin.startswith("command line"):
            raise ConfigurationError(
                f"{name}={sourced} does not work with --launcher kubernetes. {instead} Leave it out."
            )


def _name(plan: LaunchPlan, chosen: KubernetesLaunch) -> str:
    if chosen.name is None:
        # A module is named by its last part, a script by its file.
        stem = Path(plan.target.name).stem if plan.target.kind == "script" else plan.target.name
        last = stem.rpartition(".")[2] if plan.target.kind == "module" else Path(stem).name
        name = re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")[:_LONGEST_NAME].rstrip("-")
        return name if _NAME.fullmatch(name) else f"job-{name}".rstrip("-")
    if not _NAME.fullmatch(chosen.name) or len(chosen.name) > _LONGEST_NAME:
        raise ConfigurationError(
            f"--kubernetes_name {chosen.name} must begin with a lowercase letter, and have only "
            f"lowercase letters, digits and dashes, at most {_LONGEST_NAME}."
        )
    return chosen.name


def _per_machine(plan: LaunchPlan, resources: Mapping[str, str]) -> int:
    """Return the processes of each pod: by default one for each accelerator that it requests."""
    if plan.asked_processes is not None:
        return plan.processes_per_machine
    # The plan has counted the accelerators of this machine, which says nothing about the pods.
    counts = [int(count) for name, count in resources.items() if "/" in name and count.isdigit()]
    return max(counts, default=1)


def _command(plan: LaunchPlan, per_machine: int) -> tuple[str, ...]:
    """Return the command that starts the processes of one pod."""
    words = ["accelerate-core", "launch"]
    words += ["--num_machines", str(plan.num_machines)]
    words += ["--num_processes", str(plan.num_machines * per_machine)]
    for name in _FORWARDED:
        sourced = plan.provenance.get(name)
        if sourced is None or sourced.value is None or sourced.origin == "default":
            continue
        words += [f"--{name}", str(sourced.value)]
    for name in _FLAGS:
        sourced = plan.provenance.get(name)
        if sourced is not None and sourced.value:
            words.append(f"--{name}")
    return (*words, plan.target.path, *plan.target.arguments)


def _settings(plan: LaunchPlan) -> dict[str, str]:
    """Return the variables of the plan that also apply in the pods."""
    here = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", _CONFIG_VARIABLE, _ORIGINS)
    made = {name: text for name, text in plan.environment.items() if name not in here}
    made = {name: text for name, text in made.items() if not name.startswith(_OWN_VARIABLES)}
    origins = json.loads(plan.environment.get(_ORIGINS, "{}"))
    if kept := {name: origins[name] for name in made if name in origins}:
        made[_ORIGINS] = json.dumps(kept, sort_keys=True)
    return made


def _config(plan: LaunchPlan) -> str:
    """Return the config file without the keys that concern only this machine."""
    path = plan.environment.get(_CONFIG_VARIABLE)
    if path is None:
        return ""
    import yaml

    values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    kept = {key: value for key, value in values.items() if key not in _NOT_IN_PODS}
    return yaml.safe_dump(kept, sort_keys=False) if kept else ""


def _grace_period(plan: LaunchPlan, chosen: KubernetesLaunch) -> int | None:
    """Return the seconds to save in after SIGTERM, which Kubernetes sends before it ends a pod."""
    signals = plan.provenance.get("preemption_signals")
    if signals is None or not signals.value:
        return chosen.grace_period
    names = {one.strip().upper().removeprefix("SIG") for one in str(signals.value).split(",")}
    if not names & {"TERM", "15"}:
        raise ConfigurationError(
            f"preemption_signals={signals} does not have SIGTERM, the signal that Kubernetes sends "
            "before it ends a pod. Use --preemption_signals SIGTERM."
        )
    return chosen.grace_period or SAVING


def _shm_size(said: str | None) -> str | None:
    if said is None:
        return ""
    if said.lower() in ("none", "no", "false", "0"):
        return None
    if not _QUANTITY.fullmatch(said):
        raise ConfigurationError(
            f"--kubernetes_shm_size {said} must be a size such as 16Gi, or none for no volume."
        )
    return said


def _secrets(chosen: KubernetesLaunch) -> tuple[dict[str, tuple[str, str]], tuple[str, ...]]:
    """Return the variables from single keys of secrets, and the secrets that are used as a whole."""
    single: dict[str, tuple[str, str]] = {}
    whole = []
    for text in chosen.secrets or ():
        variable, equals, place = text.partition("=")
        secret, _, key = place.partition("/")
        if not equals:
            whole.append(text)
        elif _VARIABLE.fullmatch(variable) and secret and key:
            single[variable] = secret, key
        else:
            raise _malformed("secrets", text, "SECRET or VARIABLE=SECRET/KEY")
    return single, tuple(whole)


def _each(texts: Sequence[str] | None, option: str, read: Callable[[str, str], T]) -> list[T]:
    return [read(text, option) for text in texts or ()]


def _unique(option: str, pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return pairs as a dict, after checking that no key comes twice."""
    made: dict[str, str] = {}
    for key, value in pairs:
        if key in made:
            raise ConfigurationError(
                f"--kubernetes_{option}: {key} is used twice, for {made[key]} and {value}. Leave one out."
            )
        made[key] = value
    return made


def _malformed(option: str, text: str, form: str) -> ConfigurationError:
    return ConfigurationError(f"--kubernetes_{option} {text} must have the form {form}.")


def _resource(text: str, option: str) -> tuple[str, str]:
    name, _, count = text.partition("=")
    if not name or not _QUANTITY.fullmatch(count):
        raise _malformed(option, text, "NAME=QUANTITY, such as nvidia.com/gpu=8 or memory=64Gi")
    if "/" in name and not count.isdigit():
        raise ConfigurationError(
            f"--kubernetes_resources {text}: Kubernetes only accepts whole numbers of {name}."
        )
    return name, count


def _label(text: str, option: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not _LABEL.fullmatch(key):
        raise _malformed(option, text, "KEY=VALUE")
    return key, value


def _variable(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not _VARIABLE.fullmatch(name):
        raise _malformed(option, text, "NAME=VALUE or NAME")
    if name in _RANKS:
        raise ConfigurationError(
            f"--kubernetes_env {text} does not work, because the job sets {name} for each pod. Leave it out."
        )
    if equals:
        return name, value
    if name not in os.environ:
        raise ConfigurationError(
            f"--kubernetes_env {name} copies this variable from this machine, where it is not set. Set it, "
            f"or write --kubernetes_env {name}=VALUE."
        )
    return name, os.environ[name]


def _toleration(text: str, option: str) -> Mapping[str, str]:
    taint, _, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    if not key or (effect and effect not in _EFFECTS):
        raise _malformed(option, text, f"KEY[=VALUE][:EFFECT], with EFFECT {', '.join(_EFFECTS)}")
    made: dict[str, Any] = {"key": key, "operator": "Equal" if equals else "Exists"}
    made |= {"value": value} if equals else {}
    return made | ({"effect": effect} if effect else {})


def _volume(text: str, option: str) -> tuple[str, str, bool]:
    claim, _, rest = text.partition(":")
    path, _, mode = rest.partition(":")
    if not claim or not path.startswith("/") or mode not in ("", "ro", "rw"):
        raise _malformed(option, text, "CLAIM:/PATH or CLAIM:/PATH:ro")
    return claim, path, mode == "ro"
