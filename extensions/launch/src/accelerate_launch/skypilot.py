"""Turn a config file into a task file of SkyPilot. SkyPilot itself is not needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate_core.plugin import ConfigFile, ConfigurationError, parse_bool
from accelerate_core.plugins import catalog
from accelerate_launch.plan import DEFAULT_PORT, PREEMPTED
from accelerate_launch.planning import decide
from accelerate_launch.yaml_text import as_yaml

#: Where the config file is on the machines.
MOUNTED = "/tmp/accelerate-core/config.yaml"
#: Plugins that the extra `standard` brings, and those that only submit jobs elsewhere.
_NOT_EXTRAS = frozenset({"compile", "ddp", "kubernetes", "ray", "single"})

#: Launchers that start processes on other machines.
_ELSEWHERE = frozenset({"kubernetes", "mpirun", "ray", "srun", "tpu_pod"})

#: SkyPilot sets these variables on every machine. Addresses are in the order of the machines' numbers.
#: COMMAND is split as a shell would, so arguments may be quoted.
_RUN = f"""\
eval "set -- $COMMAND"
accelerate-core launch --config_file {MOUNTED} \\
    --num_machines "$SKYPILOT_NUM_NODES" --machine_rank "$SKYPILOT_NODE_RANK" \\
    --main_process_ip "$(echo "$SKYPILOT_NODE_IPS" | head -n 1)" --main_process_port {DEFAULT_PORT} \\
    --num_processes "$((SKYPILOT_NUM_NODES * {{per_machine}}))" "$@"
"""
_HEAD = """\
# Written by accelerate-core config --to skypilot from {path}.
# Start it with: sky launch {name}    or, with a restart after a preemption: sky jobs launch {name}
"""


def task_file(
    config: ConfigFile,
    environ: Mapping[str, str],
    *,
    accelerator: str | None = None,
    command: str = "train.py",
    name: str = "task.yaml",
) -> str:
    """Return a SkyPilot task that launches with a config file, as YAML.

    Args:
        accelerator: the accelerators of each machine in SkyPilot's words, such as `H100:8`. Without a
            number, it is the number of processes per machine.
        command: the script and its arguments.
        name: the name of the task file, for the comment at its beginning.
        environ: variables that change how the file is read.

    Raises:
        ConfigurationError: the file is not valid, or `accelerator` is missing or contradicts it.
    """
    # The machines find each other by SkyPilot's variables, whatever the file says.
    several = str(config.get("num_machines", 1)) != "1"
    chosen = decide({"main_process_ip": "machine-0"} if several else {}, environ, config).chosen
    machines = chosen["num_machines"].value
    if chosen["min_machines"].value is not None:
        raise ConfigurationError(
            f"num_machines={config['num_machines']!r} ({chosen['num_machines'].origin}) is a range, "
            "but a SkyPilot task has a fixed number of machines. Set one number."
        )
    launcher = chosen["launcher"].value
    if launcher in _ELSEWHERE:
        raise ConfigurationError(
            f"launcher={launcher} ({chosen['launcher'].origin}) does not work in a SkyPilot task, which "
            "starts the machines itself. Leave it out."
        )
    asked = "num_processes" in config
    per_machine = chosen["num_processes"].value // machines if asked else 1
    resources: dict[str, Any] = {}
    count: object = per_machine
    if parse_bool(chosen["cpu"].value):
        if accelerator is not None:
            raise ConfigurationError(
                f"--accelerator {accelerator} contradicts use_cpu: true ({chosen['cpu'].origin}). "
                "Leave out one of them."
            )
    else:
        resources["accelerators"] = _accelerators(accelerator, per_machine, asked, config)
        count = "SKYPILOT_NUM_GPUS_PER_NODE"
    if chosen["preemption_signals"].value:
        resources["job_recovery"] = {"recover_on_exit_codes": [PREEMPTED]}
    task = {
        "name": "accelerate",
        "num_nodes": machines,
        "resources": resources,
        "workdir": ".",
        "file_mounts": {MOUNTED: str(Path(config.path))},
        "envs": {"COMMAND": command},
        "setup": f'pip install "accelerate-core[{",".join(_extras(config, chosen["backend"].value))}]"\n',
        "run": _RUN.format(per_machine=count),
    }
    body = as_yaml([{key: value for key, value in task.items() if value != {}}])
    return _HEAD.format(path=config.path, name=name) + body


def _accelerators(said: str | None, per_machine: int, asked: bool, config: ConfigFile) -> str:
    if said is None:
        raise ConfigurationError(
            f"{config.path} does not run on the CPU, and it does not say which accelerators the "
            "machines have. Add --accelerator NAME, such as --accelerator H100:8 (sky show-gpus lists "
            "the names), or set use_cpu: true."
        )
    name, _, count = said.partition(":")
    if not name or (count and not count.isdigit()):
        raise ConfigurationError(f"--accelerator {said} must have the form NAME or NAME:NUMBER.")
    if count and asked and int(count) != per_machine:
        raise ConfigurationError(
            f"--accelerator {said} requests {count} accelerators per machine, but {config.path} starts "
            f"{per_machine} processes on each: num_processes={config.get('num_processes')} on "
            f"num_machines={config.get('num_machines', 1)}."
        )
    return f"{name}:{count or per_machine}"


def _extras(config: ConfigFile, backend: object) -> list[str]:
    """Return the extras of accelerate-core that the file's plugins need."""
    found = {extra for section, extra in catalog.SECTIONS.items() if config.get(section)}
    if backend is not None:
        found.add(catalog.extra_for("backend", str(backend)) or str(backend))
    return ["standard", *sorted(found - _NOT_EXTRAS)]
