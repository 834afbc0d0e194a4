"""Every option of `launch`: its names in all sources, and its help."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from accelerate_core.config.core import CORE_SETTINGS
from accelerate_core.plugin import (
    SettingField,
    TorchDynamoPlugin,
    option,
    settings,
    settings_fields,
)

TRAINING = "Training"

#: How the help of a setting begins if it is only accepted for older files and command lines. The help of
#: `launch` leaves such options out.
DEPRECATED = "deprecated; "

#: Setting -> the kind of plugin that its value names.
NAMES_PLUGIN = {
    "mixed_precision": "precision",
    "backend": "backend",
    "launcher": "launcher",
    "checkpointer": "checkpointer",
    "tracking": "tracking",
    "loaders": "loaders",
}


def _text(help: str, **more: Any) -> Any:
    return option(default=None, help=help, **more)


def _switch(help: str, **more: Any) -> Any:
    return option(default=None, help=help, key="", **more)


@settings(env_prefix=None, section=None)
class Processes:
    """How many processes there are, and who starts them."""

    num_processes: int | None = option(
        default=None,
        help="processes on all machines together; default: one per visible accelerator, else 1",
        ge=1,
    )
    multi_gpu: bool | None = _switch("require accelerators, with one process for each")
    gpu_ids: str | None = _text("accelerators of this machine to use, such as 0,2; or all")
    num_cpu_threads_per_process: int | None = option(
        default=None,
        help="CPU threads of each process; default: an equal share of the cores",
        key="",
        ge=1,
    )
    max_restarts: int = option(
        default=0, help="how often to restart all processes after one fails", ge=0
    )
    monitor_interval: float = option(
        default=0.1, help="seconds between two checks of the processes"
    )
    launcher: str | None = _text(
        "plugin that starts the processes; default: none for one, torchrun for more"
    )
    role: str | None = _text("name of the processes in log lines")
    enable_cpu_affinity: bool | None = option(
        default=None,
        help="bind each process to the CPU cores nearest to its accelerator",
        env="ACCELERATE_CPU_AFFINITY",
    )


@settings(env_prefix=None, section=None)
class Machines:
    """Which machines take part, and how they find each other."""

    num_machines: str = option(
        default="1",
        help="number of machines; with a range such as 2:4, the run restarts when one leaves or joins",
    )
    elastic_policy: Literal["keep_global_batch", "scale"] = option(
        default="keep_global_batch",
        help="with a range of machines: adjust the accumulation steps to keep the global batch, or let it "
        "scale with the number of processes",
    )
    machine_rank: int = option(default=0, help="number of this machine, from 0", ge=0)
    main_process_ip: str | None = _text("address of machine 0")
    main_process_port: int | None = option(
        default=None,
        help="port on machine 0; default: a free one, or 29500 for several machines",
        ge=0,
        le=65535,
    )
    rdzv_backend: str = option(
        default="static",
        help="how machines find each other: static, c10d, or another rendezvous backend of torch",
    )
    rdzv_conf: str | None = _text("settings of the rendezvous backend: key=value,key=value")
    rdzv_id: str | None = _text(
        "name of this run, the same on all machines; default: derived from the port"
    )
    mpirun_hostfile: str | None = _text(
        "file with one host per line: mpirun starts the processes on them",
        key="mpirun_config.mpirun_hostfile",
    )


@settings(env_prefix=None, section=None)
class Script:
    """How the script is run."""

    module: bool | None = _switch("SCRIPT names a module, as in python -m", cli="m")
    no_python: bool | None = _switch("run SCRIPT directly, without the Python interpreter")


@settings(env_prefix=None, section=None)
class Output:
    """What is shown and written."""

    quiet: bool | None = _switch("after a failure, show only the first rank's traceback", cli="q")
    log_dir: str | None = _text("folder for the processes' output")
    tee: str | None = _text(
        "which output to write to log_dir and also show: 1 stdout, 2 stderr, 3 both", cli="t"
    )
    dry_run: bool | None = _switch(
        "print the command and the environment without starting anything"
    )
    explain: bool | None = _switch("print each value and its source, then start")


@settings(env_prefix=None, section=None)
class Unused:
    """Options of Accelerate's command line that have no effect here."""

    same_network: bool | None = _switch("has no effect: machines always connect to main_process_ip")
    main_training_function: str | None = _text(
        "has no effect: the script runs as a program", key=""
    )


def _dynamo() -> Iterable[SettingField]:
    """Yield the compiler's settings under their option names, such as `dynamo_mode`."""
    _, section, _ = vars(TorchDynamoPlugin)["__settings_names__"]
    for one in settings_fields(TorchDynamoPlugin):
        if one.kind != "text":
            keys = tuple(f"{section}.{key}" for key in one.yaml)
            yield replace(one, name=one.cli[0], cli=one.cli[:1], yaml=keys)


#: Options that only the launcher uses. The processes don't look for them in the config file.
OWN = frozenset(
    one.name
    for cls in (Processes, Machines, Script, Output, Unused)
    for one in settings_fields(cls)
)

LAUNCH_OPTIONS: tuple[SettingField, ...] = tuple(
    replace(one, group=group)
    for group, fields in {
        "Processes": settings_fields(Processes),
        "Machines": settings_fields(Machines),
        "What to run": settings_fields(Script),
        TRAINING: [one for one in CORE_SETTINGS if one.cli],
        "Compilation": _dynamo(),
        "Output": settings_fields(Output),
        "Accepted for compatibility": settings_fields(Unused),
    }.items()
    for one in fields
)
