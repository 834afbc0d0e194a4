"""Every option of `launch`: its names in all sources, and its help, in one table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from accelerate_core.configuration.core import CORE_SETTINGS, Setting

__all__ = ["LAUNCH_OPTIONS", "LaunchOption", "known_yaml_keys"]

PROCESSES = "Processes"
MACHINES = "Machines"
TARGET = "What to run"
TRAINING = "Training"
COMPILATION = "Compilation"
OUTPUT = "Output"
UNUSED = "Accepted, without effect"


@dataclass(frozen=True)
class LaunchOption:
    """One option; `env` is the variable in which its value travels to the children."""

    name: str
    help: str
    group: str
    kind: Any = str
    short: str = ""
    env: str = ""
    yaml: tuple[str, ...] = ()
    default: Any = None
    choices: tuple[str, ...] | None = None
    minimum: int | None = None
    negatable: bool = False
    #: Its value from a file goes to the children by `env`: they do not look for it there.
    travels: bool = False


def _option(name: str, group: str, help: str, **more: Any) -> LaunchOption:
    return LaunchOption(name, help, group, **more)


_PROCESSES = (
    _option(
        "num_processes",
        PROCESSES,
        "processes on all machines together; default: one per visible accelerator, else 1",
        kind=int,
        yaml=("num_processes",),
        minimum=1,
    ),
    _option("multi_gpu", PROCESSES, "insist on accelerators: one process for each", kind=bool),
    _option(
        "gpu_ids",
        PROCESSES,
        "accelerators of this machine to use, such as 0,2; or all",
        yaml=("gpu_ids",),
    ),
    _option(
        "num_cpu_threads_per_process",
        PROCESSES,
        "CPU threads of each process; default: the cores shared out",
        kind=int,
        env="OMP_NUM_THREADS",
        minimum=1,
    ),
    _option(
        "max_restarts",
        PROCESSES,
        "how often all processes are started anew after one fails",
        kind=int,
        yaml=("max_restarts",),
        default=0,
        minimum=0,
    ),
    _option(
        "monitor_interval",
        PROCESSES,
        "seconds between two looks at the processes",
        kind=float,
        yaml=("monitor_interval",),
        default=0.1,
    ),
    _option(
        "launcher",
        PROCESSES,
        "plugin that starts the processes; default: none for one, torchrun for more",
        yaml=("launcher",),
    ),
    _option("role", PROCESSES, "name of the workers in log lines", yaml=("role",)),
    _option(
        "enable_cpu_affinity",
        PROCESSES,
        "bind each process to the CPU cores nearest to its accelerator",
        kind=bool,
        env="ACCELERATE_CPU_AFFINITY",
        yaml=("enable_cpu_affinity",),
        travels=True,
    ),
)

_MACHINES = (
    _option(
        "num_machines",
        MACHINES,
        "machines that take part",
        kind=int,
        yaml=("num_machines",),
        default=1,
        minimum=1,
    ),
    _option(
        "machine_rank",
        MACHINES,
        "number of this machine, from 0",
        kind=int,
        yaml=("machine_rank",),
        default=0,
        minimum=0,
    ),
    _option("main_process_ip", MACHINES, "address of machine 0", yaml=("main_process_ip",)),
    _option(
        "main_process_port",
        MACHINES,
        "port on machine 0; default: a free one, or 29500 for several machines",
        kind=int,
        yaml=("main_process_port",),
        minimum=0,
    ),
    _option(
        "rdzv_backend",
        MACHINES,
        "how machines find each other: static, c10d, or another that torch knows",
        yaml=("rdzv_backend",),
        default="static",
    ),
    _option("rdzv_conf", MACHINES, "settings of it: key=value,key=value", yaml=("rdzv_conf",)),
    _option(
        "rdzv_id",
        MACHINES,
        "name of this run, the same on all machines; default: made from the port",
        yaml=("rdzv_id",),
    ),
    _option(
        "mpirun_hostfile",
        MACHINES,
        "file with one host per line: mpirun starts the processes on them",
        yaml=("mpirun_config.mpirun_hostfile",),
    ),
)

_TARGET = (
    _option("module", TARGET, "SCRIPT names a module, as in python -m", kind=bool, short="-m"),
    _option("no_python", TARGET, "run SCRIPT itself, not by the Python interpreter", kind=bool),
)

_COMPILATION = (
    _option(
        "dynamo_backend",
        COMPILATION,
        "compiler for models, such as inductor or aot_eager; no is off",
        env="ACCELERATE_DYNAMO_BACKEND",
        yaml=("dynamo_config.dynamo_backend", "dynamo_config.backend"),
    ),
    _option(
        "dynamo_mode",
        COMPILATION,
        "what the compiler aims at",
        env="ACCELERATE_DYNAMO_MODE",
        yaml=("dynamo_config.dynamo_mode", "dynamo_config.mode"),
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    ),
    _option(
        "dynamo_use_fullgraph",
        COMPILATION,
        "fail where the graph breaks",
        kind=bool,
        env="ACCELERATE_DYNAMO_USE_FULLGRAPH",
        yaml=("dynamo_config.dynamo_use_fullgraph", "dynamo_config.fullgraph"),
    ),
    _option(
        "dynamo_use_dynamic",
        COMPILATION,
        "trace dynamic shapes",
        kind=bool,
        env="ACCELERATE_DYNAMO_USE_DYNAMIC",
        yaml=("dynamo_config.dynamo_use_dynamic", "dynamo_config.dynamic"),
    ),
    _option(
        "dynamo_use_regional_compilation",
        COMPILATION,
        "compile repeated blocks instead of the whole model",
        kind=bool,
        env="ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
        yaml=(
            "dynamo_config.dynamo_use_regional_compilation",
            "dynamo_config.use_regional_compilation",
        ),
    ),
)

_OUTPUT = (
    _option(
        "quiet", OUTPUT, "of a failure show only the rank's own traceback", kind=bool, short="-q"
    ),
    _option("log_dir", OUTPUT, "folder for the processes' output", yaml=("log_dir",)),
    _option(
        "tee",
        OUTPUT,
        "which output to write there and show as well: 1 stdout, 2 stderr, 3 both",
        short="-t",
        yaml=("tee",),
    ),
    _option("dry_run", OUTPUT, "print the command and the environment, start nothing", kind=bool),
    _option("explain", OUTPUT, "print each value and where it came from, then start", kind=bool),
)

_UNUSED = (
    _option("same_network", UNUSED, "main_process_ip says how machines are reached", kind=bool),
    _option("main_training_function", UNUSED, "the script is run as a program"),
)


def _of_setting(setting: Setting) -> LaunchOption:
    return LaunchOption(
        name=setting.cli[0].lstrip("-"),
        help=setting.help,
        group=TRAINING,
        kind=setting.kind,
        env=setting.env[0],
        yaml=setting.yaml,
        default=setting.default,
        choices=setting.choices,
        minimum=setting.minimum,
        negatable=setting.kind is bool,
    )


LAUNCH_OPTIONS: tuple[LaunchOption, ...] = (
    *_PROCESSES,
    *_MACHINES,
    *_TARGET,
    *(_of_setting(setting) for setting in CORE_SETTINGS if setting.cli),
    *_COMPILATION,
    *_OUTPUT,
    *_UNUSED,
)


def known_yaml_keys() -> Iterable[str]:
    """Return the top-level keys of a config file that the launcher or the core reads."""
    yield from (key.split(".")[0] for option in LAUNCH_OPTIONS for key in option.yaml)
    yield from ("backend", "compute_environment", "distributed_type", "torch_device")
