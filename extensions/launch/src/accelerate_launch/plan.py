"""The plan of a launch, which launchers turn into a command."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from accelerate_core.plugin import ConfigurationError, SourcedValue

DEFAULT_PORT = 29500
#: Exit status of ranks that have saved their state and should be started again (`EX_TEMPFAIL`).
PREEMPTED = 75
LOOPBACK = "127.0.0.1"
#: How the origin ends if the number of processes was not set but counted.
COUNTED = ("no accelerator is visible", "visible accelerator(s) per machine")


@dataclass(frozen=True)
class Target:
    """A program and its arguments, which are passed on unchanged, or the name of a function."""

    name: str
    arguments: tuple[str, ...] = ()
    kind: Literal["script", "module", "program", "function"] = "script"

    @property
    def path(self) -> str:
        """The name in a form that Python accepts as a script, even if it begins with a dash."""
        return f"./{self.name}" if self.kind == "script" and self.name[:1] == "-" else self.name


@dataclass(frozen=True)
class LaunchPlan:
    """One launch, with every value decided.

    Attributes:
        num_processes: processes on all machines together.
        num_machines: the most machines that take part.
        min_machines: the fewest with which the run continues; None if their number is fixed.
        main_process_port: None lets the system choose a free one.
        rdzv_id: name of the run for the rendezvous; None derives one from the port.
        local_addr: address at which the other machines reach this one; None lets torch find it.
        mpirun_hostfile: file with the hosts on which mpirun starts the processes.
        launcher: name of the launcher that starts this plan; None for the first that accepts it.
        environment: variables that are added to the environment of the processes.
        contributed: the settings of plugins from options, variables and the config file, by
            environment variable. Launcher plugins can decide based on them.
        provenance: each decided value with its source.
        rdzv_endpoint, log_line_prefix_template: for functions only, as in torch's `LaunchConfig`.
        start_method: for functions only: `fork`, or `spawn` for new interpreters.
    """

    target: Target
    num_processes: int = 1
    num_machines: int = 1
    min_machines: int | None = None
    elastic_policy: str = "keep_global_batch"
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str = "static"
    rdzv_conf: str = ""
    rdzv_id: str | None = None
    local_addr: str | None = None
    mpirun_hostfile: str | None = None
    max_restarts: int = 0
    monitor_interval: float = 0.1
    log_dir: str | None = None
    tee: str | None = None
    role: str | None = None
    quiet: bool = False
    launcher: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    contributed: Mapping[str, SourcedValue] = field(default_factory=dict)
    provenance: Mapping[str, SourcedValue] = field(default_factory=dict)
    rdzv_endpoint: str | None = None
    log_line_prefix_template: str | None = None
    start_method: str = "fork"

    @property
    def processes_per_machine(self) -> int:
        """The number of processes on this machine."""
        return self.num_processes // self.num_machines

    @property
    def asked_processes(self) -> SourcedValue | None:
        """The number of processes if it was set; None if the accelerators were counted."""
        number = self.provenance.get("num_processes")
        counted = number is None or number.value is None or number.origin.endswith(COUNTED)
        return None if counted else number


def machine_range(said: SourcedValue) -> tuple[int, int]:
    """Return the fewest and the most machines of `num_machines`, such as 4 or 2:4.

    Raises:
        ConfigurationError: it is neither a number nor a range.
    """
    parts = str(said.value).strip().split(":")
    if len(parts) > 2 or not all(re.fullmatch(r"\+?\d+", part) for part in parts):
        raise ConfigurationError(
            f"num_machines={said} must be a number of machines, such as 4, or a range of the form "
            "MIN:MAX, such as 2:4."
        )
    least, most = int(parts[0]), int(parts[-1])
    if least < 1:
        raise ConfigurationError(f"num_machines={said} must be at least 1.")
    if least > most:
        raise ConfigurationError(
            f"num_machines={said} begins with the larger number. Write the fewest machines first: "
            f"{most}:{least}."
        )
    return least, most


def counted(number: int, word: str) -> str:
    """Return a number with its noun: "1 process", "2 processes"."""
    plural = word + ("es" if word.endswith("s") else "s")
    return f"{number} {word if number == 1 else plural}"
